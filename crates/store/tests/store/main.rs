//! The run folder from outside, as one test program: what is promised in docs/schema.md, kept.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, and helpers of tests are tests")]
#![recursion_limit = "256"] // a row of requests.parquet as one json!

mod docs;
mod finish;
mod kill;
mod log;
mod readings;
mod run_dir;
mod sample;
mod table;
