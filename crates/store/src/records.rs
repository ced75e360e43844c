//! `requests.parquet`: one row per finished query, flat, so that any tool reads it. One line here is one column there.

use crate::column::{self, Column, count, counts, made_text, number, ordinal, text};
use crate::error::Result;
use crate::parquet_file::{self, ParquetFile};
use crate::run_dir::REQUESTS;
use arrow_schema::SchemaRef;
use std::path::Path;
use wattle_core::attribute::Share;
use wattle_core::exchange::{Outcome, TokensFrom};
use wattle_core::record::Record;
use wattle_core::summary::RunInfo;
use wattle_core::{Joules, Method};

/// The columns in their order. New ones go to the end; docs/schema.md has a row for each, and a test says so.
fn columns() -> Vec<Column> {
    vec![
        count("index", |r| Some(r.item.index)).required(),
        text("id", |r| Some(&r.item.id)).required(),
        text("response_id", |r| r.exchange.response_id.as_deref()),
        text("status", |r| Some(r.exchange.outcome.status())).required(),
        text("error", |r| r.exchange.outcome.error()),
        count("due_ns", |r| Some(r.exchange.due.nanos())).required(),
        count("sent_ns", |r| Some(r.exchange.sent.nanos())).required(),
        count("first_token_ns", |r| r.exchange.first_token.map(|t| t.nanos())),
        count("done_ns", |r| Some(r.exchange.done.nanos())).required(),
        counts("token_ns", |r| r.exchange.tokens.iter().map(|t| t.nanos()).collect()).required(),
        count("prompt_tokens", |r| r.exchange.usage.prompt),
        count("completion_tokens", |r| r.exchange.usage.completion),
        count("reasoning_tokens", |r| r.exchange.usage.reasoning),
        count("cached_tokens", |r| r.exchange.usage.cached),
        text("tokens_from", |r| r.exchange.usage.from.map(TokensFrom::name)),
        share("energy_j", Share::total),
        share("energy_bound_j", |s| s.bound),
        text("energy_method", |r| r.share.map(|s| Method::name(s.method))),
        number("energy_coverage", |r| r.share.map(|s| s.coverage)),
        text("energy_perimeter", |r| r.perimeter.map(|p| p.name())),
        share("prefill_j", |s| s.prefill),
        share("decode_j", |s| s.decode),
        share("shared_j", |s| s.shared),
        text("subject", |r| r.item.subject.as_deref()),
        text("prompt", |r| Some(&r.item.prompt)).required(),
        text("answer", |r| Some(&r.exchange.answer)).required(),
        text("expected", |r| r.item.expected.as_deref()),
        number("score", |r| r.score.as_ref().map(|s| s.value)),
        text("scorer", |r| r.score.as_ref().map(|s| s.scorer.as_str())),
        share("queue_j", |s| s.queue),
        number("gpu_j", |r| r.telemetry.gpu.map(Joules::get)),
        number("cpu_j", |r| r.telemetry.cpu.map(Joules::get)),
        number("dram_j", |r| r.telemetry.dram.map(Joules::get)),
        number("ane_j", |r| r.telemetry.ane.map(Joules::get)),
        text("finish", |r| match &r.exchange.outcome {
            Outcome::Ok { finish } => Some(finish.name()),
            Outcome::Failed { .. } => None,
        }),
        ordinal("session", |r| Some(r.session)).required(),
        made_text("metadata", |r| (!r.item.metadata.is_empty()).then(|| metadata_json(r))),
        made_text("server", |r| r.exchange.server.as_ref().map(ToString::to_string)),
        text("dated_by", |r| Some(r.exchange.dated.name())).required(),
        ordinal("attempts", |r| Some(r.exchange.attempts)).required(),
        text("conversation", |r| r.item.conversation.as_deref()),
        number("to_first_token_j", |r| r.share.and_then(|s| s.to_first_token).map(Joules::get)),
    ]
}

fn share(name: &str, part: fn(&Share) -> Joules) -> Column {
    number(name, move |r| r.share.as_ref().map(|s| part(s).get()))
}

/// The dataset's other columns as JSON text: their keys vary from row to row, and a table's columns do not.
pub(crate) fn metadata_json(record: &Record) -> String {
    serde_json::to_string(&record.item.metadata)
        .unwrap_or_else(|_| unreachable!("a map of JSON values is JSON"))
}

/// Writes `requests.parquet`.
pub(crate) struct RequestsWriter {
    columns: Vec<Column>,
    schema: SchemaRef,
    file: ParquetFile,
}

impl RequestsWriter {
    pub(crate) fn create(run: &Path, info: &RunInfo) -> Result<Self> {
        let columns = columns();
        let schema = column::schema(&columns);
        // Long prompts make long row groups; the memory of one is bounded in bytes as well as in rows.
        let properties = parquet_file::properties(info)
            .set_max_row_group_row_count(Some(1 << 16))
            .set_max_row_group_bytes(Some(32 << 20));
        let properties = parquet_file::stamps(properties, &["token_ns", "list", "item"]);
        let file = ParquetFile::create(run.join(REQUESTS), schema.clone(), properties)?;
        Ok(Self { columns, schema, file })
    }

    pub(crate) fn write(&mut self, rows: &[Record]) -> Result<()> {
        let batch = column::batch(&self.schema, &self.columns, rows);
        self.file.write(&batch.map_err(|e| self.file.failed(e))?)
    }

    pub(crate) fn commit(self) -> Result<()> {
        self.file.commit()
    }
}
