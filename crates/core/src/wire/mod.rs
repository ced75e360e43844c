//! What model servers say, as pure parsers: bytes in, meaning out. Stamps are taken by the client before any of this runs.

pub mod ollama;
pub mod openai;
pub mod prometheus;
pub mod sse;
pub mod timings;
