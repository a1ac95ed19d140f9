//! The blockyard program.
fn main() {}
