//! What the machine draws. The only home of the clock and of foreign libraries; no async, no storage.
//!
//! [`source::open`] opens what this machine has, [`Meter::start`] reads it on a thread of its own, [`Meter::drain`] hands the
//! readings over. What they mean is `wattle_core`'s business.

pub mod alarm;
pub mod child;
pub mod clock;
mod host;
mod joules;
pub mod kin;
pub mod receive;
mod sampler;
pub mod source;

pub use host::host;
pub use joules::{JouleError, Joulemeter};
pub use sampler::{Cost, Meter, Spread, Timing};
