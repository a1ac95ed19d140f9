//! The indexes under test.

pub(crate) mod blockyard;
pub(crate) mod dynamo;
pub(crate) mod smg;
