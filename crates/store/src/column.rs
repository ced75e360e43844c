//! A column says its name, its type and its value in one line; tables are lists of columns, nested ones trees of them.

use arrow_array::builder::{ListBuilder, UInt64Builder};
use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, RecordBatch, StringArray, StructArray, UInt32Array, UInt64Array,
};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};
use std::borrow::Cow;
use std::sync::Arc;
use wattle_core::record::Record;

type Get<T> = Box<dyn Fn(&Record) -> Option<T>>;
type GetText = Box<dyn for<'r> Fn(&'r Record) -> Option<Cow<'r, str>>>;

/// One column of a table made of records.
pub(crate) struct Column {
    name: String,
    nullable: bool,
    cell: Cell,
}

enum Cell {
    Ordinal(Get<u32>),
    Count(Get<u64>),
    Number(Get<f64>),
    Flag(Get<bool>),
    Text(GetText),
    Counts(Get<Vec<u64>>),
    Group { columns: Vec<Column>, present: bool },
}

fn column(name: impl Into<String>, cell: Cell) -> Column {
    Column { name: name.into(), nullable: true, cell }
}

/// A small number that counts up.
pub(crate) fn ordinal(name: &str, get: impl Fn(&Record) -> Option<u32> + 'static) -> Column {
    column(name, Cell::Ordinal(Box::new(get)))
}

/// A count, or nanoseconds.
pub(crate) fn count(name: &str, get: impl Fn(&Record) -> Option<u64> + 'static) -> Column {
    column(name, Cell::Count(Box::new(get)))
}

/// A figure; what is not finite is null.
pub(crate) fn number(name: &str, get: impl Fn(&Record) -> Option<f64> + 'static) -> Column {
    column(name, Cell::Number(Box::new(move |r| get(r).filter(|x| x.is_finite()))))
}

/// Yes or no.
pub(crate) fn flag(name: &str, get: impl Fn(&Record) -> Option<bool> + 'static) -> Column {
    column(name, Cell::Flag(Box::new(get)))
}

/// Text that the record holds.
pub(crate) fn text(name: &str, get: impl Fn(&Record) -> Option<&str> + 'static) -> Column {
    column(name, Cell::Text(Box::new(move |r| get(r).map(Cow::Borrowed))))
}

/// Text that is made from the record.
pub(crate) fn made_text(name: &str, get: impl Fn(&Record) -> Option<String> + 'static) -> Column {
    column(name, Cell::Text(Box::new(move |r| get(r).map(Cow::Owned))))
}

/// Several counts, or stamps.
pub(crate) fn counts(name: &str, get: impl Fn(&Record) -> Vec<u64> + 'static) -> Column {
    column(name, Cell::Counts(Box::new(move |r| Some(get(r)))))
}

/// Columns under a common name.
pub(crate) fn group(name: &str, columns: Vec<Column>) -> Column {
    column(name, Cell::Group { columns, present: true })
}

impl Column {
    /// The column never holds a null.
    pub(crate) fn required(self) -> Self {
        Self { nullable: false, ..self }
    }

    /// The whole group is null unless `present`.
    pub(crate) fn null_unless(mut self, condition: bool) -> Self {
        if let Cell::Group { present, .. } = &mut self.cell {
            *present = condition;
        }
        self
    }

    fn field(&self) -> Field {
        let data_type = match &self.cell {
            Cell::Ordinal(_) => DataType::UInt32,
            Cell::Count(_) => DataType::UInt64,
            Cell::Number(_) => DataType::Float64,
            Cell::Flag(_) => DataType::Boolean,
            Cell::Text(_) => DataType::Utf8,
            Cell::Counts(_) => DataType::List(Arc::new(stamp_item())),
            Cell::Group { columns, .. } => DataType::Struct(fields(columns)),
        };
        Field::new(&self.name, data_type, self.nullable)
    }

    fn array(&self, rows: &[Record]) -> ArrayRef {
        let rows_of = || rows.iter();
        match &self.cell {
            Cell::Ordinal(get) => Arc::new(rows_of().map(get).collect::<UInt32Array>()),
            Cell::Count(get) => Arc::new(rows_of().map(get).collect::<UInt64Array>()),
            Cell::Number(get) => Arc::new(rows_of().map(get).collect::<Float64Array>()),
            Cell::Flag(get) => Arc::new(rows_of().map(get).collect::<BooleanArray>()),
            Cell::Text(get) => Arc::new(rows_of().map(get).collect::<StringArray>()),
            Cell::Counts(get) => {
                let mut list = ListBuilder::new(UInt64Builder::new()).with_field(stamp_item());
                for row in rows {
                    list.values().append_slice(&get(row).unwrap_or_default());
                    list.append(true);
                }
                Arc::new(list.finish())
            }
            Cell::Group { columns, present: false } => {
                Arc::new(StructArray::new_null(fields(columns), rows.len()))
            }
            Cell::Group { columns, .. } => {
                let arrays = columns.iter().map(|c| c.array(rows)).collect();
                Arc::new(StructArray::new(fields(columns), arrays, None))
            }
        }
    }
}

fn stamp_item() -> Field {
    Field::new_list_field(DataType::UInt64, false)
}

fn fields(columns: &[Column]) -> Fields {
    columns.iter().map(Column::field).collect()
}

/// The schema of a table of these columns.
pub(crate) fn schema(columns: &[Column]) -> SchemaRef {
    Arc::new(Schema::new(fields(columns)))
}

/// Some rows of it.
pub(crate) fn batch(
    schema: &SchemaRef,
    columns: &[Column],
    rows: &[Record],
) -> std::result::Result<RecordBatch, ArrowError> {
    RecordBatch::try_new(schema.clone(), columns.iter().map(|c| c.array(rows)).collect())
}
