//! What is kept: the run folder. Its schema is public (docs/schema.md), and this is the only user of Arrow and Parquet.
//!
//! `log.jsonl` is the single source of truth: every finished request is in it, whole, the moment it is finished. The tables
//! (`requests.parquet`, `readings.parquet`, `hf/`) are made from it and from the raw streams when a session ends, and can be
//! made again at any time. Nothing here reads a clock: wall times are handed in.
#![forbid(unsafe_code)]

mod column;
mod error;
mod file;
mod finish;
mod hf;
mod log;
mod parquet_file;
mod readings;
mod records;
mod run_dir;

pub use error::{Result, StoreError};
pub use finish::Finished;
pub use log::{Lines, LogWriter, Records, Replay};
pub use readings::{ReadingsWriter, StoredReadings};
pub use run_dir::{Lock, RunDir, read_json, write_json};
