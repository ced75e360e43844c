//! wattle as a library: the same five crates the binary is made of.
//!
//! ```
//! use wattle::core::{Joules, Seconds, Watts};
//! assert_eq!(Watts(100.0) * Seconds(2.0), Joules(200.0));
//! ```

pub use wattle_core as core;
pub use wattle_lab as lab;
pub use wattle_meter as meter;
pub use wattle_serve as serve;
pub use wattle_store as store;
