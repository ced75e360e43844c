//! What is tried: prompts, load, scores. Prints nothing and serves nothing; the binary watches it through [`run::Observer`].

mod books;
pub mod calibrate;
pub mod client;
pub mod dataset;
mod error;
pub mod exec;
mod folder;
mod http;
pub mod launch;
mod metering;
pub mod run;
pub mod score;
pub mod server;
mod stop;
mod summarize;
pub mod sweep;
pub mod tokenizer;

pub use error::LabError;
pub use folder::Destination;
pub use metering::recording;
pub use stop::{Stop, StopCause};
pub use summarize::sum_up;
