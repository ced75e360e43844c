//! A model: its shape, vocabulary and weights, read from a GGUF file and checked against each other.
//!
//! Whatever the forward pass would silently ignore (a bias, an expert, a scaled RoPE) is an error
//! here: a model that loads is a model that is computed right.

use std::collections::BTreeMap;

use super::error::EngineError;
use super::gguf::{Gguf, format_name};
use super::kernel::Matrix;
use super::vocab::Vocab;

const ARCHITECTURE: &str = "general.architecture";
const SCALING: &str = "llama.rope.scaling.type";
const CONTEXT: &str = "llama.context_length";
const HEADS: &str = "llama.attention.head_count";
const KV_HEADS: &str = "llama.attention.head_count_kv";
const OUTPUT: &str = "output.weight";

/// The largest KV cache of one session. The demonstration models need 1 MB; this is where a
/// mistaken context length stops being an accident that memory can carry.
const CACHE_LIMIT: u64 = 256 << 20;

/// A loaded model; sessions share it.
#[derive(Debug)]
pub struct Model {
    pub(super) info: Info,
    pub(super) shape: Shape,
    pub(super) vocab: Vocab,
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// None when the embedding serves as the output, too.
    pub(super) output: Option<Matrix>,
}

/// What a model is, for people and for the record of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// The name that the file gives itself, if it does.
    pub name: Option<String>,
    /// How many weights there are.
    pub parameters: u64,
    /// How many layers there are.
    pub layers: usize,
    /// How many tokens a session can hold.
    pub context: usize,
    /// The format of most weights, such as `q8_0`.
    pub format: String,
    /// The size of the file.
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) layers: usize,
    pub(super) context: usize,
    pub(super) dim: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) feed_forward: usize,
    pub(super) epsilon: f32,
    pub(super) rope_base: f64,
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) query: Matrix,
    pub(super) key: Matrix,
    pub(super) value: Matrix,
    pub(super) attention_output: Matrix,
    pub(super) feed_forward_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

impl Model {
    /// Reads a model from the bytes of a GGUF file, which are not needed afterwards.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EngineError> {
        let mut gguf = Gguf::parse(bytes)?;
        // First, because it is what most models fail at, whatever else is different about them.
        let vocab = Vocab::read(&gguf)?;
        let shape = Shape::read(&gguf)?;
        let (parameters, format) = weigh(&gguf);
        let info = Info {
            name: gguf.get::<&str>("general.name")?.map(str::to_owned),
            parameters,
            layers: shape.layers,
            context: shape.context,
            format,
            bytes: bytes.len() as u64,
        };
        let embedding = matrix(&mut gguf, "token_embd.weight", vocab.tokens(), shape.dim)?;
        let layers =
            (0..shape.layers).map(|i| Layer::read(&mut gguf, &shape, i)).collect::<Result<_, _>>()?;
        let norm = vector(&mut gguf, "output_norm.weight", shape.dim)?;
        let output = match gguf.tensors().contains_key(OUTPUT) {
            true => Some(matrix(&mut gguf, OUTPUT, vocab.tokens(), shape.dim)?),
            false => None,
        };
        if let Some(name) = gguf.tensors().keys().next() {
            return Err(EngineError::tensor(name, "is no part of a plain llama model"));
        }
        Ok(Self { info, shape, vocab, embedding, layers, norm, output })
    }

    /// What the model is.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The model's tokenizer.
    pub fn vocab(&self) -> &Vocab {
        &self.vocab
    }
}

impl Shape {
    fn read(gguf: &Gguf<'_>) -> Result<Self, EngineError> {
        let architecture = gguf.need(ARCHITECTURE)?;
        let scaling = gguf.get(SCALING)?.unwrap_or("none");
        for (key, found, known) in [(ARCHITECTURE, architecture, "llama"), (SCALING, scaling, "none")] {
            if found != known {
                return Err(EngineError::metadata(key, format!("is {found:?}, not {known:?}")));
            }
        }
        let positive = |key: &str| match gguf.need(key)? {
            0 => Err(EngineError::metadata(key, "is 0")),
            n => Ok(n),
        };
        let dim: usize = positive("llama.embedding_length")?;
        let heads = positive(HEADS)?;
        let kv_heads = gguf.get(KV_HEADS)?.unwrap_or(heads);
        let head_dim = dim / heads;
        // Even, because RoPE turns pairs.
        if !dim.is_multiple_of(heads) || !head_dim.is_multiple_of(2) {
            return Err(EngineError::metadata(HEADS, format!("does not divide {dim} into even heads")));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(EngineError::metadata(KV_HEADS, format!("does not divide the {heads} heads")));
        }
        for key in
            ["llama.rope.dimension_count", "llama.attention.key_length", "llama.attention.value_length"]
        {
            if gguf.get(key)?.is_some_and(|size: usize| size != head_dim) {
                return Err(EngineError::metadata(key, format!("is not the head's size, {head_dim}")));
            }
        }
        let shape = Self {
            layers: positive("llama.block_count")?,
            context: positive(CONTEXT)?,
            dim,
            heads,
            kv_heads,
            head_dim,
            feed_forward: positive("llama.feed_forward_length")?,
            epsilon: gguf.need::<f64>("llama.attention.layer_norm_rms_epsilon")? as f32,
            rope_base: gguf.get("llama.rope.freq_base")?.unwrap_or(10_000.0),
        };
        let sizes = [2, size_of::<f32>(), shape.layers, shape.context, shape.kv_dim()];
        let bytes = sizes.iter().fold(1, |bytes: u64, size| bytes.saturating_mul(*size as u64));
        if bytes > CACHE_LIMIT {
            let problem =
                format!("asks for a KV cache of {bytes} bytes, more than the {CACHE_LIMIT} allowed");
            return Err(EngineError::metadata(CONTEXT, problem));
        }
        Ok(shape)
    }

    /// Values per position in one layer's cache of keys, or of values.
    pub(super) fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

impl Layer {
    fn read(gguf: &mut Gguf<'_>, shape: &Shape, index: usize) -> Result<Self, EngineError> {
        let (dim, kv_dim, feed_forward) = (shape.dim, shape.kv_dim(), shape.feed_forward);
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        Ok(Self {
            attention_norm: vector(gguf, &name("attn_norm"), dim)?,
            query: matrix(gguf, &name("attn_q"), dim, dim)?,
            key: matrix(gguf, &name("attn_k"), kv_dim, dim)?,
            value: matrix(gguf, &name("attn_v"), kv_dim, dim)?,
            attention_output: matrix(gguf, &name("attn_output"), dim, dim)?,
            feed_forward_norm: vector(gguf, &name("ffn_norm"), dim)?,
            gate: matrix(gguf, &name("ffn_gate"), feed_forward, dim)?,
            up: matrix(gguf, &name("ffn_up"), feed_forward, dim)?,
            down: matrix(gguf, &name("ffn_down"), dim, feed_forward)?,
        })
    }
}

fn matrix(gguf: &mut Gguf<'_>, name: &str, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
    let (format, bytes) = gguf.take(name, rows, cols)?;
    Ok(Matrix::repack(format, bytes, cols))
}

fn vector(gguf: &mut Gguf<'_>, name: &str, length: usize) -> Result<Vec<f32>, EngineError> {
    let matrix = matrix(gguf, name, 1, length)?;
    let mut vector = vec![0.0; length];
    matrix.row(0, &mut vector);
    Ok(vector)
}

/// How many weights there are, and the format of most of them. The file's own `general.file_type`
/// is a claim, this is a fact.
fn weigh(gguf: &Gguf<'_>) -> (u64, String) {
    let mut by_kind = BTreeMap::<u32, u64>::new();
    for tensor in gguf.tensors().values() {
        let sum = by_kind.entry(tensor.kind).or_default();
        *sum = sum.saturating_add(tensor.parameters());
    }
    let most = by_kind.iter().max_by_key(|(_, parameters)| **parameters);
    let format = most.map(|(kind, _)| format_name(*kind).to_lowercase());
    (by_kind.values().fold(0, |sum, n| sum.saturating_add(*n)), format.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::fixture::{FORMATS, Fixture, SMALL, Spec, Writer, tokens};
    use super::super::gguf::Format;
    use super::super::sample::SplitMix64;
    use super::super::session::Session;
    use super::*;

    /// Small enough to try a great many broken copies.
    const TINY: Spec =
        Spec { layers: 1, dim: 4, heads: 2, kv_heads: 1, feed_forward: 3, context: 4, ..SMALL };

    /// Loads and runs a file that may be broken in any way; returning at all is the point.
    fn survive(file: &[u8]) -> Result<(), EngineError> {
        let mut session = Session::new(Arc::new(Model::from_bytes(file)?));
        session.prefill(&[1, 100])?;
        Ok(())
    }

    #[test]
    fn the_file_says_what_it_is() {
        for (format, label) in FORMATS.into_iter().zip(["f32", "f16", "q8_0", "q4_0"]) {
            let fixture = Fixture::new(Spec { format, ..SMALL });
            let model = Model::from_bytes(&fixture.file).unwrap();
            let layer = 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96;
            let expected = Info {
                name: Some("fixture".to_owned()),
                parameters: 2 * 259 * 64 + 64 + 2 * layer,
                layers: 2,
                context: 24,
                format: label.to_owned(),
                bytes: fixture.file.len() as u64,
            };
            assert_eq!(*model.info(), expected);
        }
    }

    #[test]
    fn a_file_cut_anywhere_is_an_error() {
        let file = Fixture::new(TINY).file;
        survive(&file).unwrap();
        // The last tensor ends within the last 32 bytes, the rest is padding.
        for length in 0..file.len() - 32 {
            assert!(survive(&file[..length]).is_err(), "{length} of {} bytes", file.len());
        }
    }

    #[test]
    fn no_flipped_byte_makes_a_panic() {
        for format in [Format::F32, Format::Q8_0, Format::Q4_0] {
            let width = if format == Format::F32 { 4 } else { 32 };
            let file = Fixture::new(Spec { format, dim: width, feed_forward: width, ..TINY }).file;
            let mut random = SplitMix64(11);
            let mut refused = 0;
            for _ in 0..4_000 {
                let mut broken = file.clone();
                for _ in 0..1 + random.next() % 3 {
                    // The header is the first 6 kB; it is where the harm can be done.
                    let at = random.next() as usize % file.len().min(6_000);
                    broken[at] ^= 1 << (random.next() % 8);
                }
                refused += u32::from(survive(&broken).is_err());
            }
            assert!(refused > 1_000, "only {refused} of 4000 broken files were noticed");
        }
    }

    #[test]
    fn a_model_that_would_be_computed_wrong_is_refused() {
        let refusal = |change: &dyn Fn(&mut Writer)| {
            let file = Fixture::with(TINY, change).file;
            Model::from_bytes(&file).unwrap_err().to_string()
        };
        let bias = refusal(&|writer| writer.tensor_of_type("blk.0.attn_q.bias", &[4], 0, vec![0; 16]));
        assert!(bias.contains("blk.0.attn_q.bias is no part"), "{bias}");
        let scaled = refusal(&|writer| writer.text(SCALING, "yarn"));
        assert!(scaled.contains("is \"yarn\", not \"none\""), "{scaled}");
        let partial = refusal(&|writer| writer.count("llama.rope.dimension_count", 1));
        assert!(partial.contains("is not the head's size, 2"), "{partial}");
        let twice = refusal(&|writer| writer.count(HEADS, 1));
        assert!(twice.contains("head_count is there twice"), "{twice}");
    }

    #[test]
    fn sizes_that_do_not_fit_each_other_are_refused() {
        let layers = |layers| Fixture::new(Spec { layers, ..TINY }).file;
        assert!(Model::from_bytes(&layers(0)).unwrap_err().to_string().contains("block_count is 0"));
        for (spec, what) in [
            (Spec { heads: 3, ..TINY }, "even heads"),
            (Spec { heads: 4, kv_heads: 4, ..TINY }, "even heads"),
            (Spec { dim: 8, heads: 4, kv_heads: 3, ..TINY }, "does not divide the 4 heads"),
            (Spec { context: 1 << 31, ..TINY }, "KV cache"),
            (Spec { context: 0, ..TINY }, "context_length is 0"),
        ] {
            let error = Model::from_bytes(&Fixture::new(spec).file).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn a_real_model_is_told_that_it_is_not_byte_level_before_anything_else() {
        let mut writer = Writer::new();
        writer.text(ARCHITECTURE, "qwen2");
        writer.texts("tokenizer.ggml.tokens", &[tokens(), vec!["▁the".to_owned()]].concat());
        writer.tensor_of_type("token_embd.weight", &[256, 260], 12, vec![0; 64]);
        let error = Model::from_bytes(&writer.finish()).unwrap_err();
        assert_eq!(error, EngineError::NotByteLevel { tokens: 260 });
    }
}
