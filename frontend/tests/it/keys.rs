//! API keys: which requests need one, what it allows, its limits, and changes of the key file.

mod cancelled;
mod file;
mod permissions;
mod relayed_usage;
mod request_limits;
mod setup;
mod stored_responses;
