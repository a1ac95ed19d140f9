//! The front door over HTTP, in process, before a scripted engine.

mod tiny;
