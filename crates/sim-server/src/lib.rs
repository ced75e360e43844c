//! A scripted model server. Tests and benchmarks only; Linux only.

mod clock;
mod config;
mod engine;
mod trap;

pub use config::{Config, EveryNth};
pub use engine::{Cost, Engine, EngineConfig, Joules, Told};
pub use trap::{Shape, Trap};
