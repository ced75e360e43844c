//! Reads a GGUF file (version 2 or 3, little-endian) that is already in memory.
//!
//! The file is not trusted: every length and offset is checked against the bytes that are there
//! before anything is read or allocated, so a lying header costs an error and no memory.
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::BTreeMap;

use super::error::EngineError;

type Result<T> = std::result::Result<T, EngineError>;

/// A parsed header, and the data that its tensors point into.
#[derive(Debug)]
pub(super) struct Gguf<'a> {
    metadata: BTreeMap<&'a str, Value<'a>>,
    tensors: BTreeMap<&'a str, Tensor>,
    alignment: usize,
    data: &'a [u8],
}

/// What the header says of a tensor, unchecked. A vector is a matrix of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor {
    /// The number of its format in `enum ggml_type`.
    pub(super) kind: u32,
    rows: usize,
    cols: usize,
    offset: usize,
}

impl Tensor {
    /// How many weights it claims to have.
    pub(super) fn parameters(&self) -> u64 {
        (self.rows as u64).saturating_mul(self.cols as u64)
    }
}

/// A format of weights that this engine has a kernel for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    F32,
    F16,
    /// Blocks of 32: an f16 scale, then 32 signed bytes.
    Q8_0,
    /// Blocks of 32: an f16 scale, then 16 bytes whose low nibbles are the first half, biased by 8.
    Q4_0,
}

impl Format {
    fn of(kind: u32) -> Option<Self> {
        match kind {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            2 => Some(Self::Q4_0),
            8 => Some(Self::Q8_0),
            _ => None,
        }
    }

    /// Values per block and bytes per block.
    pub(super) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
        }
    }
}

/// What ggml calls a format.
pub(super) fn format_name(kind: u32) -> String {
    // `enum ggml_type`, by number; the empty ones were removed from it.
    const NAMES: &[&str] = &[
        "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
        "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
        "I16", "I32", "I64", "F64", "IQ1_M", "BF16",
    ];
    match NAMES.get(kind as usize) {
        Some(name) if !name.is_empty() => (*name).to_owned(),
        _ => format!("ggml type {kind}"),
    }
}

/// A metadata value.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    Texts(Vec<&'a str>),
    /// A list of numbers: skipped, nothing here needs one.
    Numbers,
}

/// A type that a metadata value can be asked for as.
pub(super) trait FromValue<'a>: Sized {
    const WHAT: &'static str;
    fn from_value(value: &Value<'a>) -> Option<Self>;
}

macro_rules! from_value {
    ($type:ty, $what:literal, $pattern:pat => $result:expr) => {
        impl<'a> FromValue<'a> for $type {
            const WHAT: &'static str = $what;
            fn from_value(value: &Value<'a>) -> Option<Self> {
                match value {
                    $pattern => $result,
                    _ => None,
                }
            }
        }
    };
}

from_value!(usize, "a whole number in range", Value::Integer(n) => (*n).try_into().ok());
from_value!(u32, "a whole number in range", Value::Integer(n) => (*n).try_into().ok());
from_value!(f64, "a floating-point number", Value::Float(x) => Some(*x));
from_value!(bool, "a truth value", Value::Bool(yes) => Some(*yes));
from_value!(&'a str, "a text", Value::Text(text) => Some(text));
from_value!(Vec<&'a str>, "a list of texts", Value::Texts(texts) => Some(texts.clone()));

impl<'a> Gguf<'a> {
    /// Reads the header. Tensors are checked when they are taken.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(4, "magic")? != b"GGUF" {
            return Err(EngineError::malformed("no GGUF magic", 0));
        }
        let version = reader.u32("version")?;
        if !(2..=3).contains(&version) {
            return Err(EngineError::malformed(format!("version {version}, not 2 or 3,"), 4));
        }
        let (tensors, metadata) = (reader.size("tensor count")?, reader.size("metadata count")?);
        let mut gguf = Self { metadata: BTreeMap::new(), tensors: BTreeMap::new(), alignment: 32, data: &[] };
        for _ in 0..metadata {
            let (key, value) = (reader.text("metadata key")?, reader.value()?);
            if gguf.metadata.insert(key, value).is_some() {
                return Err(EngineError::metadata(key, "is there twice"));
            }
        }
        for _ in 0..tensors {
            let (name, tensor) = reader.tensor()?;
            if gguf.tensors.insert(name, tensor).is_some() {
                return Err(EngineError::tensor(name, "is there twice"));
            }
        }
        gguf.alignment = gguf.get(ALIGNMENT)?.unwrap_or(gguf.alignment);
        if !gguf.alignment.is_power_of_two() {
            return Err(EngineError::metadata(ALIGNMENT, "is not a power of two"));
        }
        let start = reader.at.checked_next_multiple_of(gguf.alignment);
        gguf.data = start.and_then(|start| bytes.get(start..)).unwrap_or_default();
        Ok(gguf)
    }

    /// The metadata at `key`, if there is any.
    pub(super) fn get<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let value = T::from_value(value);
        value.map(Some).ok_or_else(|| EngineError::metadata(key, format!("is not {}", T::WHAT)))
    }

    /// The metadata at `key`, which must be there.
    pub(super) fn need<T: FromValue<'a>>(&self, key: &str) -> Result<T> {
        self.get(key)?.ok_or_else(|| EngineError::metadata(key, "is missing"))
    }

    /// The tensors that have not been taken yet, by name.
    pub(super) fn tensors(&self) -> &BTreeMap<&'a str, Tensor> {
        &self.tensors
    }

    /// Takes the tensor `name`: its format, and its bytes, which are exactly `rows` × `cols` values.
    pub(super) fn take(&mut self, name: &str, rows: usize, cols: usize) -> Result<(Format, &'a [u8])> {
        let tensor = self.tensors.remove(name).ok_or_else(|| EngineError::tensor(name, "is missing"))?;
        if (tensor.rows, tensor.cols) != (rows, cols) {
            let problem = format!("is {} × {}, not {rows} × {cols}", tensor.rows, tensor.cols);
            return Err(EngineError::tensor(name, problem));
        }
        let format = Format::of(tensor.kind).ok_or_else(|| {
            let stored = format_name(tensor.kind);
            EngineError::tensor(name, format!("is stored as {stored}, not as F32, F16, Q8_0 or Q4_0"))
        })?;
        let (values, bytes) = format.block();
        if !tensor.offset.is_multiple_of(self.alignment) || !cols.is_multiple_of(values) {
            return Err(EngineError::tensor(name, "is not aligned as its format asks"));
        }
        let size = (cols / values).checked_mul(bytes).and_then(|row| row.checked_mul(rows));
        let bytes = size.and_then(|size| self.data.get(tensor.offset..)?.get(..size));
        let bytes = bytes.ok_or_else(|| EngineError::tensor(name, "reaches past the end of the file"))?;
        Ok((format, bytes))
    }
}

const ALIGNMENT: &str = "general.alignment";

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..n));
        let taken =
            taken.ok_or_else(|| EngineError::malformed(format!("{what} of {n} bytes cut short"), self.at))?;
        self.at += n;
        Ok(taken)
    }

    /// A little-endian number of up to eight bytes.
    fn number(&mut self, width: usize, what: &str) -> Result<u64> {
        Ok(self.take(width, what)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(self.number(4, what)? as u32)
    }

    fn size(&mut self, what: &str) -> Result<usize> {
        let at = self.at;
        let size = self.number(8, what)?;
        usize::try_from(size).map_err(|_| EngineError::malformed(format!("{what} of {size}"), at))
    }

    fn text(&mut self, what: &str) -> Result<&'a str> {
        let length = self.size(what)?;
        let at = self.at;
        let text = std::str::from_utf8(self.take(length, what)?);
        text.map_err(|_| EngineError::malformed(format!("{what} that is not UTF-8"), at))
    }

    fn value(&mut self) -> Result<Value<'a>> {
        const WHAT: &str = "metadata value";
        let kind = self.u32("metadata type")?;
        let width = match kind {
            8 => return self.text(WHAT).map(Value::Text),
            9 => return self.list(),
            _ => self.width(kind)?,
        };
        let number = self.number(width, WHAT)?;
        let unused = 64 - 8 * width;
        Ok(match kind {
            6 => Value::Float(f32::from_bits(number as u32).into()),
            12 => Value::Float(f64::from_bits(number)),
            7 => Value::Bool(number != 0),
            1 | 3 | 5 | 11 => Value::Integer(((number << unused).cast_signed() >> unused).into()),
            _ => Value::Integer(number.into()),
        })
    }

    fn list(&mut self) -> Result<Value<'a>> {
        let kind = self.u32("list type")?;
        let length = self.size("list length")?;
        if kind != 8 {
            let width = self.width(kind)?;
            self.take(length.saturating_mul(width), "list")?;
            return Ok(Value::Numbers);
        }
        // Grows with what is read, not with what the header promises.
        let mut texts = Vec::new();
        for _ in 0..length {
            texts.push(self.text("list text")?);
        }
        Ok(Value::Texts(texts))
    }

    /// Bytes of a number of metadata type `kind`. Lists in lists have none, so none can nest deep.
    fn width(&self, kind: u32) -> Result<usize> {
        match kind {
            0 | 1 | 7 => Ok(1),
            2 | 3 => Ok(2),
            4..=6 => Ok(4),
            10..=12 => Ok(8),
            _ => Err(EngineError::malformed(format!("metadata of type {kind}"), self.at)),
        }
    }

    fn tensor(&mut self) -> Result<(&'a str, Tensor)> {
        let name = self.text("tensor name")?;
        let dimensions = self.u32("tensor dimensions")?;
        if !(1..=4).contains(&dimensions) {
            return Err(EngineError::tensor(name, format!("has {dimensions} dimensions, not 1 to 4")));
        }
        let cols = self.size("tensor shape")?;
        let mut rows: usize = 1;
        for _ in 1..dimensions {
            rows = rows.saturating_mul(self.size("tensor shape")?);
        }
        let kind = self.u32("tensor type")?;
        Ok((name, Tensor { kind, rows, cols, offset: self.size("tensor offset")? }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Writer;
    use super::*;

    #[test]
    fn metadata_of_every_type_is_read() {
        let mut writer = Writer::new();
        for (kind, bytes) in
            [(0, &[200][..]), (2, &[1, 2]), (4, &[1, 0, 0, 0]), (10, &[1, 0, 0, 0, 0, 0, 0, 0])]
        {
            writer.value(&format!("unsigned {kind}"), kind, bytes);
        }
        for (kind, width) in [(1, 1), (3, 2), (5, 4), (11, 8)] {
            writer.value(&format!("signed {kind}"), kind, &[0xff; 8][..width]);
        }
        writer.value("f64", 12, &0.1_f64.to_le_bytes());
        writer.value("numbers", 9, &[4, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        writer.float("f32", 0.5);
        writer.flag("flag", true);
        writer.text("text", "▁");
        writer.texts("texts", &["a".to_owned(), String::new()]);
        let file = writer.finish();
        let gguf = Gguf::parse(&file).unwrap();

        assert_eq!(gguf.need::<usize>("unsigned 0").unwrap(), 200);
        assert_eq!(gguf.need::<usize>("unsigned 2").unwrap(), 513);
        assert_eq!(gguf.need::<u32>("unsigned 4").unwrap(), 1);
        assert_eq!(gguf.need::<usize>("unsigned 10").unwrap(), 1);
        for kind in [1, 3, 5, 11] {
            let key = format!("signed {kind}");
            assert!(matches!(gguf.metadata[key.as_str()], Value::Integer(-1)));
            assert!(
                gguf.need::<usize>(&key).unwrap_err().to_string().contains("not a whole number in range")
            );
        }
        assert_eq!(gguf.need::<f64>("f64").unwrap(), 0.1);
        assert_eq!(gguf.need::<f64>("f32").unwrap(), 0.5);
        assert!(gguf.need::<bool>("flag").unwrap());
        assert_eq!(gguf.need::<&str>("text").unwrap(), "▁");
        assert_eq!(gguf.need::<Vec<&str>>("texts").unwrap(), ["a", ""]);
        assert!(gguf.get::<f64>("numbers").is_err());
        assert_eq!(gguf.get::<f64>("absent").unwrap(), None);
    }

    #[test]
    fn a_count_that_lies_costs_an_error_and_no_memory() {
        for (at, what) in [(8, "tensor"), (16, "metadata")] {
            let mut file = Writer::new().finish();
            file[at..at + 8].fill(0xff);
            let error = Gguf::parse(&file).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains("at byte 32"), "{error}");
        }
        for kind in [8, 9] {
            let mut writer = Writer::new();
            let list_of_texts = [8, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
            writer.value("key", kind, &list_of_texts);
            assert!(matches!(Gguf::parse(&writer.finish()), Err(EngineError::Malformed { .. })));
        }
    }

    #[test]
    fn a_tensor_outside_the_file_is_refused() {
        for shape in [[4, 5], [usize::MAX, 1], [1 << 33, 1 << 33], [4, usize::MAX]] {
            let mut writer = Writer::new();
            writer.tensor_of_type("t", &shape, 0, vec![0; 64]);
            let file = writer.finish();
            let error = Gguf::parse(&file).unwrap().take("t", shape[1], shape[0]).unwrap_err();
            assert!(error.to_string().contains("past the end"), "{error}");
        }
    }

    #[test]
    fn a_format_without_a_kernel_is_named() {
        for (kind, name) in [(12, "Q4_K"), (30, "BF16"), (4, "ggml type 4"), (999, "ggml type 999")] {
            let mut writer = Writer::new();
            writer.tensor_of_type("t", &[256, 1], kind, vec![0; 1024]);
            let file = writer.finish();
            let error = Gguf::parse(&file).unwrap().take("t", 1, 256).unwrap_err();
            assert!(error.to_string().contains(&format!("t is stored as {name}, not")), "{error}");
        }
    }
}
