//! Scenarios over the whole program.

mod cache;
mod closed_output;
mod cluster;
mod configuration;
mod connections;
mod crash_recovery;
mod doctor;
mod fault_soak;
mod file_modes;
mod index_audit;
mod keys;
mod layers;
mod metrics;
mod monitoring;
mod overload;
mod process;
mod reload;
mod scenarios;
mod serve;
mod shred;
mod stop_soak;
mod tenants;
mod trace_replay;
mod unread_log;
mod upstreams;
