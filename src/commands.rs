//! The commands of the program: their arguments, and what each does. `serve` is put together in `main`.

pub mod bench;
pub mod cache;
pub mod calibrate;
pub mod cli;
pub mod doctor;
pub mod key;
pub mod output;
pub mod replay;
