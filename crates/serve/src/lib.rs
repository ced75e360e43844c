//! What others see. It cannot see the lab and meets it only on disk: whatever is shown here can be shown of any run folder.

pub mod curve;
pub mod report;
