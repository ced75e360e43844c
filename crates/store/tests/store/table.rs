//! Reads tables back, row by row, as JSON.

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_ipc::reader::StreamReader;
use arrow_schema::{DataType, SchemaRef};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::path::Path;

pub(crate) fn parquet(path: &Path) -> (SchemaRef, Vec<Value>) {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let schema = builder.schema().clone();
    let batches = builder.build().unwrap();
    (schema, batches.flat_map(|b| rows(&b.unwrap())).collect())
}

pub(crate) fn stream(path: &Path) -> (SchemaRef, Vec<Value>) {
    let reader = StreamReader::try_new(File::open(path).unwrap(), None).unwrap();
    (reader.schema(), reader.flat_map(|b| rows(&b.unwrap())).collect())
}

/// The labels of a Parquet file.
pub(crate) fn label(path: &Path, key: &str) -> Option<String> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let labels = builder.metadata().file_metadata().key_value_metadata().unwrap();
    labels.iter().find(|kv| kv.key == key)?.value.clone()
}

/// A type in the words of docs/schema.md.
pub(crate) fn type_name(data_type: &DataType) -> String {
    match data_type {
        DataType::UInt16 => "uint16".into(),
        DataType::UInt32 => "uint32".into(),
        DataType::UInt64 => "uint64".into(),
        DataType::Float64 => "float64".into(),
        DataType::Boolean => "bool".into(),
        DataType::Utf8 => "string".into(),
        DataType::List(item) => format!("list<{}>", type_name(item.data_type())),
        DataType::Dictionary(key, value) => format!("dictionary<{}, {}>", type_name(key), type_name(value)),
        other => panic!("no word for {other}"),
    }
}

fn rows(batch: &RecordBatch) -> Vec<Value> {
    let schema = batch.schema();
    let row = |i| -> Map<String, Value> {
        schema.fields().iter().zip(batch.columns()).map(|(f, c)| (f.name().clone(), cell(c, i))).collect()
    };
    (0..batch.num_rows()).map(|i| Value::Object(row(i))).collect()
}

fn cell(array: &ArrayRef, i: usize) -> Value {
    if array.is_null(i) {
        return Value::Null;
    }
    match array.data_type() {
        DataType::UInt16 => json!(array.as_primitive::<UInt16Type>().value(i)),
        DataType::UInt32 => json!(array.as_primitive::<UInt32Type>().value(i)),
        DataType::UInt64 => json!(array.as_primitive::<UInt64Type>().value(i)),
        DataType::Float64 => json!(array.as_primitive::<Float64Type>().value(i)),
        DataType::Boolean => json!(array.as_boolean().value(i)),
        DataType::Utf8 => json!(array.as_string::<i32>().value(i)),
        DataType::List(_) => {
            let items = array.as_list::<i32>().value(i);
            (0..items.len()).map(|j| cell(&items, j)).collect()
        }
        DataType::Dictionary(..) => {
            let array = array.as_dictionary::<UInt16Type>();
            cell(array.values(), usize::from(array.keys().value(i)))
        }
        DataType::Struct(fields) => {
            let array = array.as_struct();
            let values = fields.iter().zip(array.columns()).map(|(f, c)| (f.name().clone(), cell(c, i)));
            Value::Object(values.collect())
        }
        other => panic!("{other} is in no table"),
    }
}
