//! wattle as a library: the joules of a closure in three lines, and the five crates that the binary is made of.
//!
//! ```
//! let mut meter = wattle::Joulemeter::open()?;
//! let (sum, energy) = meter.measure(|| (0..1_000_000u64).sum::<u64>());
//! println!("{sum} for {}", energy.map_or_else(|| "unknown".into(), |e| e.to_string()));
//! # Ok::<(), wattle::JouleError>(())
//! ```
//! An [`Estimate`] prints as `12.3 J ± 0.4 J (counter)`; where nothing can be measured its method is `model`, and that is an estimate.

pub use wattle_core as core;
pub use wattle_lab as lab;
pub use wattle_meter as meter;
pub use wattle_serve as serve;
pub use wattle_store as store;

pub use wattle_core::{Estimate, Joules, Method, Seconds, Watts};
pub use wattle_meter::{JouleError, Joulemeter};
