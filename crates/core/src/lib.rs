//! What a measurement means. Pure: same input, same output; no I/O, no clock, no threads, no `unsafe`.
//!
//! The ten core types: [`Joules`]/[`Watts`]/[`Seconds`]/[`Tokens`], [`Stamp`] and [`Span`], [`Sensor`] and [`Reading`],
//! [`Timeline`], [`Estimate`], [`Exchange`], [`Share`], [`Spec`], [`Event`], [`Record`]. ARCHITECTURE.md has the picture.
#![forbid(unsafe_code)]

pub mod account;
pub mod arrival;
pub mod attribute;
pub mod baseline;
pub mod calibration;
pub mod command;
pub mod cost;
pub mod estimate;
pub mod event;
pub mod exchange;
pub mod length;
pub mod metrics;
pub mod qualify;
pub mod record;
pub mod registry;
pub mod scale;
pub mod seen;
pub mod sensor;
pub mod shuffle;
pub mod slo;
pub mod spec;
pub mod stats;
pub mod steady;
pub mod summary;
pub mod survey;
pub mod sweep;
pub mod time;
pub mod timeline;
pub mod units;
pub mod warning;
pub mod wire;

pub use attribute::Share;
pub use estimate::{Estimate, Method};
pub use event::Event;
pub use exchange::Exchange;
pub use record::Record;
pub use sensor::{Reading, Sensor, SensorId};
pub use spec::Spec;
pub use time::{Span, Stamp};
pub use timeline::Timeline;
pub use units::{Joules, Seconds, Tokens, Watts};
pub use warning::Warning;
