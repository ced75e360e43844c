//! A Parquet file on its way to its name: compressed, and saying which run and which version of the schema it is from.

use crate::error::{Cause, Result, StoreError};
use crate::file::Pending;
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use parquet::schema::types::ColumnPath;
use std::path::PathBuf;
use wattle_core::summary::{RunInfo, SCHEMA_VERSION};

/// What all Parquet files of a run have in common.
pub(crate) fn properties(info: &RunInfo) -> WriterPropertiesBuilder {
    let labels = vec![
        KeyValue::new("wattle.schema_version".into(), SCHEMA_VERSION.to_string()),
        KeyValue::new("wattle.run_id".into(), info.run_id.clone()),
    ];
    WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_key_value_metadata(Some(labels))
}

/// Says that a column holds stamps: they only grow, so their differences are small, and stored as such.
pub(crate) fn stamps(properties: WriterPropertiesBuilder, column: &[&str]) -> WriterPropertiesBuilder {
    let path = ColumnPath::new(column.iter().map(ToString::to_string).collect());
    properties
        .set_column_dictionary_enabled(path.clone(), false)
        .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED)
}

/// Writes one.
pub(crate) struct ParquetFile {
    path: PathBuf,
    writer: ArrowWriter<Pending>,
}

impl ParquetFile {
    pub(crate) fn create(
        path: PathBuf,
        schema: SchemaRef,
        properties: WriterPropertiesBuilder,
    ) -> Result<Self> {
        let pending = Pending::create(path.clone())?;
        let writer = ArrowWriter::try_new(pending, schema, Some(properties.build()));
        Ok(Self { writer: writer.map_err(|e| StoreError::write(&path, e))?, path })
    }

    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        self.writer.write(batch).map_err(|e| self.failed(e))
    }

    /// Adds one more label.
    pub(crate) fn label(&mut self, key: &str, value: String) {
        self.writer.append_key_value_metadata(KeyValue::new(key.into(), value));
    }

    /// Gives the file its name.
    pub(crate) fn commit(self) -> Result<()> {
        self.writer.into_inner().map_err(|e| StoreError::write(&self.path, e))?.commit()
    }

    pub(crate) fn failed(&self, error: impl Into<Cause>) -> StoreError {
        StoreError::write(&self.path, error)
    }
}
