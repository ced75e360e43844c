//! For tests only: writes small random llama models as GGUF, and computes their logits in f64 in the
//! most naive way, from weights that never went through the parser or the kernels.

use std::collections::BTreeMap;

use super::gguf::Format;
use super::sample::SplitMix64;

pub(super) const FORMATS: [Format; 4] = [Format::F32, Format::F16, Format::Q8_0, Format::Q4_0];

/// The shape of a made-up model.
#[derive(Clone, Copy)]
pub(super) struct Spec {
    pub(super) format: Format,
    pub(super) layers: usize,
    pub(super) dim: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) feed_forward: usize,
    pub(super) context: usize,
    pub(super) tied: bool,
}

/// Grouped queries, a separate output, two layers: every branch of the forward pass.
pub(super) const SMALL: Spec = Spec {
    format: Format::F32,
    layers: 2,
    dim: 64,
    heads: 4,
    kv_heads: 2,
    feed_forward: 96,
    context: 24,
    tied: false,
};

pub(super) struct Fixture {
    pub(super) spec: Spec,
    pub(super) file: Vec<u8>,
    weights: BTreeMap<String, Vec<f64>>,
}

/// The vocabulary of the demonstration models.
pub(super) fn tokens() -> Vec<String> {
    let byte = |byte: u8| if byte == b' ' { "▁".to_owned() } else { format!("<0x{byte:02X}>") };
    ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain((0..=255).map(byte)).collect()
}

impl Fixture {
    pub(super) fn new(spec: Spec) -> Self {
        Self::with(spec, &|_| ())
    }

    /// A model with something more in its file.
    pub(super) fn with(spec: Spec, change: &dyn Fn(&mut Writer)) -> Self {
        let mut writer = Writer::new();
        writer.text("general.architecture", "llama");
        writer.text("general.name", "fixture");
        for (key, value) in [
            ("block_count", spec.layers),
            ("context_length", spec.context),
            ("embedding_length", spec.dim),
            ("feed_forward_length", spec.feed_forward),
            ("attention.head_count", spec.heads),
            ("attention.head_count_kv", spec.kv_heads),
        ] {
            writer.count(&format!("llama.{key}"), value);
        }
        writer.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
        writer.texts("tokenizer.ggml.tokens", &tokens());
        writer.flag("tokenizer.ggml.add_space_prefix", false);

        let mut random = SplitMix64(1);
        let mut weights = BTreeMap::new();
        for (name, rows, cols) in spec.tensors() {
            let format = if rows == 1 { Format::F32 } else { spec.format };
            let (bytes, values) = random_tensor(format, rows, cols, &mut random);
            writer.tensor(&name, rows, cols, format, bytes);
            weights.insert(name, values);
        }
        change(&mut writer);
        Self { spec, file: writer.finish(), weights }
    }

    /// The logits after `ids`, computed from scratch without a cache.
    pub(super) fn naive_logits(&self, ids: &[u32]) -> Vec<f64> {
        let Spec { layers, dim, heads, kv_heads, tied, .. } = self.spec;
        let head_dim = dim / heads;
        let mut streams: Vec<Vec<f64>> = ids
            .iter()
            .map(|id| self.weights["token_embd.weight"][*id as usize * dim..][..dim].to_vec())
            .collect();
        for layer in 0..layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let normed: Vec<_> = streams.iter().map(|x| self.norm(&name("attn_norm"), x)).collect();
            let project = |part: &str| normed.iter().map(|x| self.times(&name(part), x)).collect::<Vec<_>>();
            let (mut queries, mut keys, values) = (project("attn_q"), project("attn_k"), project("attn_v"));
            for position in 0..ids.len() {
                rope(&mut queries[position], position, head_dim);
                rope(&mut keys[position], position, head_dim);
            }
            for position in 0..ids.len() {
                let mut attended = vec![0.0; dim];
                for head in 0..heads {
                    let kv = head * kv_heads / heads;
                    let score = |key: &[f64]| {
                        let products = (0..head_dim)
                            .map(|i| queries[position][head * head_dim + i] * key[kv * head_dim + i]);
                        (products.sum::<f64>() / (head_dim as f64).sqrt()).exp()
                    };
                    let scores: Vec<f64> = keys[..=position].iter().map(|key| score(key)).collect();
                    for (score, value) in scores.iter().zip(&values) {
                        for i in 0..head_dim {
                            attended[head * head_dim + i] +=
                                score / scores.iter().sum::<f64>() * value[kv * head_dim + i];
                        }
                    }
                }
                add(&mut streams[position], &self.times(&name("attn_output"), &attended));
                let normed = self.norm(&name("ffn_norm"), &streams[position]);
                let gate = self.times(&name("ffn_gate"), &normed);
                let up = self.times(&name("ffn_up"), &normed);
                let gated: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                add(&mut streams[position], &self.times(&name("ffn_down"), &gated));
            }
        }
        let normed = self.norm("output_norm.weight", streams.last().unwrap());
        self.times(if tied { "token_embd.weight" } else { "output.weight" }, &normed)
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(&self.weights[name]).map(|(v, w)| v / scale * w).collect()
    }

    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let rows = self.weights[name].chunks_exact(x.len());
        rows.map(|row| row.iter().zip(x).map(|(w, v)| w * v).sum()).collect()
    }
}

fn rope(vector: &mut [f64], position: usize, head_dim: usize) {
    for i in (0..vector.len()).step_by(2) {
        let angle = position as f64 / 10_000_f64.powf((i % head_dim) as f64 / head_dim as f64);
        let (a, b) = (vector[i], vector[i + 1]);
        vector[i] = a * angle.cos() - b * angle.sin();
        vector[i + 1] = a * angle.sin() + b * angle.cos();
    }
}

fn add(x: &mut [f64], delta: &[f64]) {
    x.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
}

impl Spec {
    fn tensors(&self) -> Vec<(String, usize, usize)> {
        let (dim, kv_dim) = (self.dim, self.dim / self.heads * self.kv_heads);
        let mut tensors = vec![("token_embd", 259, dim), ("output_norm", 1, dim)];
        if !self.tied {
            tensors.push(("output", 259, dim));
        }
        let layer = [
            ("attn_norm", 1, dim),
            ("attn_q", dim, dim),
            ("attn_k", kv_dim, dim),
            ("attn_v", kv_dim, dim),
            ("attn_output", dim, dim),
            ("ffn_norm", 1, dim),
            ("ffn_gate", self.feed_forward, dim),
            ("ffn_up", self.feed_forward, dim),
            ("ffn_down", dim, self.feed_forward),
        ];
        let mut named: Vec<_> = tensors.iter().map(|(n, r, c)| (format!("{n}.weight"), *r, *c)).collect();
        for i in 0..self.layers {
            named.extend(layer.iter().map(|(n, r, c)| (format!("blk.{i}.{n}.weight"), *r, *c)));
        }
        named
    }
}

/// Random weights of about 0.1, as the file stores them and as the numbers that they stand for.
/// Norms, the vectors, are near 1.
pub(super) fn random_tensor(
    format: Format,
    rows: usize,
    cols: usize,
    random: &mut SplitMix64,
) -> (Vec<u8>, Vec<f64>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    let offset = if rows == 1 { 1.0 } else { 0.0 };
    // A half between 2^(exponent − 15) and twice that, which is returned too.
    let half = |exponent: u16, bits: u64| {
        let mantissa = bits as u16 & 0x3ff;
        let value = (1.0 + f64::from(mantissa) / 1024.0) * 2_f64.powi(i32::from(exponent) - 15);
        ((exponent << 10 | mantissa).to_le_bytes(), value)
    };
    for _ in 0..rows * cols / format.block().0 {
        match format {
            Format::F32 => {
                let value = (random.fraction() * 0.4 - 0.2 + offset) as f32;
                bytes.extend(value.to_le_bytes());
                values.push(f64::from(value));
            }
            Format::F16 => {
                let bits = random.next();
                let (mut half, value) = half(11, bits);
                half[1] |= (bits >> 63 << 7) as u8;
                bytes.extend(half);
                values.push(if bits >> 63 == 1 { -value } else { value });
            }
            Format::Q8_0 => {
                let (scale, value) = half(5, random.next());
                bytes.extend(scale);
                for _ in 0..32 {
                    let quant = (random.next() % 255) as i64 - 127;
                    bytes.push(quant as u8);
                    values.push(quant as f64 * value);
                }
            }
            Format::Q4_0 => {
                let (scale, value) = half(9, random.next());
                bytes.extend(scale);
                let packed: Vec<u8> = (0..16).map(|_| random.next() as u8).collect();
                values.extend(packed.iter().map(|byte| (f64::from(byte % 16) - 8.0) * value));
                values.extend(packed.iter().map(|byte| (f64::from(byte / 16) - 8.0) * value));
                bytes.extend(packed);
            }
        }
    }
    (bytes, values)
}

/// Writes GGUF version 3.
pub(super) struct Writer {
    metadata: Vec<u8>,
    metadata_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { metadata: vec![], metadata_count: 0, tensors: vec![], tensor_count: 0, data: vec![] }
    }

    pub(super) fn value(&mut self, key: &str, kind: u32, bytes: &[u8]) {
        put_text(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(bytes);
        self.metadata_count += 1;
    }

    pub(super) fn count(&mut self, key: &str, value: usize) {
        self.value(key, 4, &(value as u32).to_le_bytes());
    }

    pub(super) fn float(&mut self, key: &str, value: f32) {
        self.value(key, 6, &value.to_le_bytes());
    }

    pub(super) fn flag(&mut self, key: &str, value: bool) {
        self.value(key, 7, &[u8::from(value)]);
    }

    pub(super) fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        put_text(&mut bytes, value);
        self.value(key, 8, &bytes);
    }

    pub(super) fn texts(&mut self, key: &str, values: &[String]) {
        let mut bytes = 8_u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| put_text(&mut bytes, value));
        self.value(key, 9, &bytes);
    }

    pub(super) fn tensor(&mut self, name: &str, rows: usize, cols: usize, format: Format, bytes: Vec<u8>) {
        let kind: u32 = match format {
            Format::F32 => 0,
            Format::F16 => 1,
            Format::Q4_0 => 2,
            Format::Q8_0 => 8,
        };
        let shape: &[usize] = if rows == 1 { &[cols] } else { &[cols, rows] };
        self.tensor_of_type(name, shape, kind, bytes);
    }

    pub(super) fn tensor_of_type(&mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) {
        put_text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| self.tensors.extend((*n as u64).to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        self.tensor_count += 1;
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
    }

    pub(super) fn finish(self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(self.tensor_count.to_le_bytes());
        file.extend(self.metadata_count.to_le_bytes());
        file.extend(self.metadata);
        file.extend(self.tensors);
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(self.data);
        file
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
