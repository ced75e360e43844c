//! One conversation with a model: the forward pass, its KV cache and its scratch memory.
//!
//! Everything is allocated when the session is made; a token allocates nothing. One thread: below
//! some ten million parameters a second one costs more than it brings.

use std::sync::Arc;

use super::error::EngineError;
use super::kernel::{Cpu, Operand, dot};
use super::model::{Layer, Model, Shape};

/// What a model has read so far, and room to read on.
#[derive(Debug)]
pub struct Session {
    model: Arc<Model>,
    /// Per layer, per position: the key and the value of every KV head.
    keys: Vec<f32>,
    values: Vec<f32>,
    pass: Pass,
    logits: Vec<f32>,
}

impl Session {
    /// An empty session, with memory for the model's whole context.
    pub fn new(model: Arc<Model>) -> Self {
        Self::on(Cpu::detect(), model)
    }

    fn on(cpu: Cpu, model: Arc<Model>) -> Self {
        let cache = model.layers.len() * model.shape.context * model.shape.kv_dim();
        Self {
            keys: vec![0.0; cache],
            values: vec![0.0; cache],
            pass: Pass::new(cpu, model.shape),
            logits: vec![0.0; model.vocab.tokens()],
            model,
        }
    }

    /// The model that reads here.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How many more tokens fit.
    pub fn room(&self) -> usize {
        self.model.shape.context - self.pass.position
    }

    /// Forgets everything read.
    pub fn reset(&mut self) {
        self.pass.position = 0;
    }

    /// Reads some tokens and gives the logits of the one to follow. If they do not fit, none is read.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<&[f32], EngineError> {
        self.check_room(ids.len())?;
        for id in ids {
            self.absorb(*id)?;
        }
        self.logits()
    }

    /// Reads one token and gives the logits of the one to follow.
    pub fn step(&mut self, id: u32) -> Result<&[f32], EngineError> {
        self.absorb(id)?;
        self.logits()
    }

    pub(super) fn check_room(&self, tokens: usize) -> Result<(), EngineError> {
        if tokens > self.room() {
            let (context, needed) = (self.model.shape.context, self.pass.position + tokens);
            return Err(EngineError::ContextFull { context, needed });
        }
        Ok(())
    }

    /// Reads one token, without the work of logits that nobody asked for.
    pub(super) fn absorb(&mut self, id: u32) -> Result<(), EngineError> {
        self.check_room(1)?;
        let Self { model, keys, values, pass, .. } = self;
        let tokens = model.vocab.tokens();
        let row = usize::try_from(id).ok().filter(|row| *row < tokens);
        model.embedding.row(row.ok_or(EngineError::UnknownToken { id, tokens })?, &mut pass.stream);
        pass.turn();
        let cached = model.shape.context * model.shape.kv_dim();
        let caches = keys.chunks_exact_mut(cached).zip(values.chunks_exact_mut(cached));
        for (layer, (keys, values)) in model.layers.iter().zip(caches) {
            pass.attend(layer, keys, values);
            pass.feed_forward(layer);
        }
        pass.position += 1;
        Ok(())
    }

    /// The logits of the token to follow.
    pub(super) fn logits(&mut self) -> Result<&[f32], EngineError> {
        let Self { model, pass, logits, .. } = self;
        let position = pass.position;
        if position == 0 {
            return Err(EngineError::NothingAbsorbed);
        }
        pass.norm(&model.norm);
        pass.input.times(model.output.as_ref().unwrap_or(&model.embedding), logits);
        match logits.iter().all(|logit| logit.is_finite()) {
            true => Ok(logits),
            false => Err(EngineError::NotFinite { position }),
        }
    }
}

/// One token's way through the layers: where it stands, what it has become, and scratch memory.
#[derive(Debug)]
struct Pass {
    shape: Shape,
    /// How many tokens came before this one.
    position: usize,
    /// Per pair of a head's values, the cosine and sine of the angle at this position.
    rotation: Vec<(f32, f32)>,
    /// The residual stream, to which every sublayer adds its `delta`.
    stream: Vec<f32>,
    delta: Vec<f32>,
    /// What the next matrices multiply.
    input: Operand,
    query: Vec<f32>,
    scores: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

impl Pass {
    fn new(cpu: Cpu, shape: Shape) -> Self {
        let Shape { context, dim, head_dim, feed_forward, .. } = shape;
        Self {
            shape,
            position: 0,
            rotation: vec![(1.0, 0.0); head_dim / 2],
            stream: vec![0.0; dim],
            delta: vec![0.0; dim],
            input: Operand::new(cpu, dim.max(feed_forward)),
            query: vec![0.0; dim],
            scores: vec![0.0; context],
            attended: vec![0.0; dim],
            gate: vec![0.0; feed_forward],
            up: vec![0.0; feed_forward],
        }
    }

    /// Sets the angles of the rotary embedding.
    fn turn(&mut self) {
        for (i, pair) in self.rotation.iter_mut().enumerate() {
            let frequency = self.shape.rope_base.powf(-((2 * i) as f64) / self.shape.head_dim as f64);
            let (sin, cos) = (self.position as f64 * frequency).sin_cos();
            *pair = (cos as f32, sin as f32);
        }
    }

    /// Makes the normed stream the input.
    fn norm(&mut self, weights: &[f32]) {
        let mean_square = dot(&self.stream, &self.stream) / self.stream.len() as f32;
        let scale = 1.0 / (mean_square + self.shape.epsilon).sqrt();
        self.input.load(self.stream.iter().zip(weights).map(|(value, weight)| value * scale * weight));
    }

    /// Adds what the layer's attention finds at the positions up to this one.
    fn attend(&mut self, layer: &Layer, keys: &mut [f32], values: &mut [f32]) {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        let kv_dim = self.shape.kv_dim();
        let here = self.position * kv_dim..(self.position + 1) * kv_dim;
        self.norm(&layer.attention_norm);
        self.input.times(&layer.key, &mut keys[here.clone()]);
        self.input.times(&layer.value, &mut values[here.clone()]);
        self.input.times(&layer.query, &mut self.query);
        rotate(&mut self.query, &self.rotation);
        rotate(&mut keys[here], &self.rotation);

        let scale = 1.0 / (head_dim as f32).sqrt();
        let scores = &mut self.scores[..=self.position];
        let outputs = self.attended.chunks_exact_mut(head_dim);
        for (head, (query, attended)) in self.query.chunks_exact(head_dim).zip(outputs).enumerate() {
            let kv_head = head / (heads / kv_heads);
            let part = kv_head * head_dim..(kv_head + 1) * head_dim;
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(kv_dim)) {
                *score = dot(query, &key[part.clone()]) * scale;
            }
            softmax(scores);
            attended.fill(0.0);
            for (score, value) in scores.iter().zip(values.chunks_exact(kv_dim)) {
                for (attended, value) in attended.iter_mut().zip(&value[part.clone()]) {
                    *attended += score * value;
                }
            }
        }
        self.input.load(self.attended.iter().copied());
        self.input.times(&layer.attention_output, &mut self.delta);
        self.add();
    }

    /// Adds what the layer's gated feed-forward network makes of the stream.
    fn feed_forward(&mut self, layer: &Layer) {
        self.norm(&layer.feed_forward_norm);
        self.input.times(&layer.gate, &mut self.gate);
        self.input.times(&layer.up, &mut self.up);
        let silu = |gate: f32| gate / (1.0 + (-gate).exp());
        self.input.load(self.gate.iter().zip(&self.up).map(|(gate, up)| silu(*gate) * up));
        self.input.times(&layer.down, &mut self.delta);
        self.add();
    }

    fn add(&mut self) {
        for (value, delta) in self.stream.iter_mut().zip(&self.delta) {
            *value += delta;
        }
    }
}

/// Turns neighbouring pairs: llama.cpp's NORM order, in which GGUF files of llama models are written.
fn rotate(heads: &mut [f32], rotation: &[(f32, f32)]) {
    for head in heads.chunks_exact_mut(2 * rotation.len()) {
        for ([a, b], (cos, sin)) in head.as_chunks_mut().0.iter_mut().zip(rotation) {
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        }
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    for score in scores {
        *score /= sum;
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{FORMATS, Fixture, SMALL, Spec};
    use super::super::gguf::Format;
    use super::*;

    const IDS: [u32; 9] = [1, 52, 46, 55, 64, 200, 3, 258, 64];

    fn session(fixture: &Fixture) -> Session {
        Session::new(Arc::new(Model::from_bytes(&fixture.file).unwrap()))
    }

    /// The root mean square of the differences, relative to that of the logits.
    fn error(logits: &[f32], naive: &[f64]) -> f64 {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        assert_eq!(logits.len(), naive.len());
        let differences = &mut logits.iter().zip(naive).map(|(a, b)| f64::from(*a) - b);
        squares(differences) / squares(&mut naive.iter().copied())
    }

    #[test]
    fn the_forward_pass_agrees_with_the_naive_one() {
        for format in FORMATS {
            for spec in [SMALL, Spec { tied: true, kv_heads: 4, ..SMALL }, Spec { kv_heads: 1, ..SMALL }] {
                let fixture = Fixture::new(Spec { format, ..spec });
                let mut session = session(&fixture);
                let error = error(session.prefill(&IDS).unwrap(), &fixture.naive_logits(&IDS));
                let tolerance = match format {
                    // f32 rounds at 6e-8; two layers of sums of 64 to 96 terms multiply that by some ten.
                    Format::F32 | Format::F16 => 2e-6,
                    // An activation is rounded to 1/127 of the largest of its 32, some 2 sigma: an error of
                    // 2/127/sqrt(12) = 0.5 % of sigma at each of the 9 roundings on a logit's way, which
                    // add like noise: 1.5 %.
                    Format::Q8_0 | Format::Q4_0 => 0.03,
                };
                assert!(error < tolerance, "{format:?}: {error:e}");
            }
        }
    }

    #[test]
    fn both_instruction_sets_compute_the_same_logits() {
        for format in FORMATS {
            let fixture = Fixture::new(Spec { format, ..SMALL });
            let model = Arc::new(Model::from_bytes(&fixture.file).unwrap());
            let mut sessions = [Cpu::detect(), Cpu::BASELINE].map(|cpu| Session::on(cpu, Arc::clone(&model)));
            let [detected, baseline] = sessions.each_mut().map(|session| session.prefill(&IDS).unwrap());
            assert_eq!(detected, baseline, "{format:?}");
        }
    }

    #[test]
    fn prefill_is_the_same_as_steps() {
        let fixture = Fixture::new(SMALL);
        let (mut whole, mut split, mut single) = (session(&fixture), session(&fixture), session(&fixture));
        let logits = whole.prefill(&IDS).unwrap();
        split.prefill(&IDS[..4]).unwrap();
        assert_eq!(split.prefill(&IDS[4..]).unwrap(), logits);
        let steps = IDS.map(|id| single.step(id).unwrap().to_vec());
        assert_eq!(steps[8], logits);
    }

    #[test]
    fn reset_forgets() {
        let fixture = Fixture::new(SMALL);
        let mut session = session(&fixture);
        let fresh = session.prefill(&IDS[..3]).unwrap().to_vec();
        let went_on = session.prefill(&IDS[..3]).unwrap().to_vec();
        assert_ne!(fresh, went_on);
        session.reset();
        assert_eq!(session.room(), 24);
        assert_eq!(session.prefill(&IDS[..3]).unwrap(), fresh);
    }

    #[test]
    fn a_full_context_is_an_error_and_does_no_harm() {
        let fixture = Fixture::new(SMALL);
        let mut session = session(&fixture);
        assert_eq!(
            session.prefill(&[1; 25]).unwrap_err(),
            EngineError::ContextFull { context: 24, needed: 25 }
        );
        assert_eq!(session.room(), 24);
        session.prefill(&[1; 24]).unwrap();
        assert_eq!(session.step(1).unwrap_err(), EngineError::ContextFull { context: 24, needed: 25 });
        session.reset();
        session.step(1).unwrap();
    }

    #[test]
    fn what_cannot_be_answered_is_an_error() {
        let fixture = Fixture::new(SMALL);
        let mut session = session(&fixture);
        assert_eq!(session.prefill(&[]).unwrap_err(), EngineError::NothingAbsorbed);
        for id in [259, u32::MAX] {
            assert_eq!(session.step(id).unwrap_err(), EngineError::UnknownToken { id, tokens: 259 });
        }
        assert_eq!(session.room(), 24);
    }

    #[test]
    fn damaged_weights_are_noticed() {
        for format in FORMATS {
            let mut fixture = Fixture::new(Spec { format, ..SMALL });
            // The last tensor is the last layer's `ffn_down`: its first value or scale becomes NaN.
            let (values, bytes) = format.block();
            let start = fixture.file.len() - 64 * 96 / values * bytes;
            fixture.file[start..start + 4].fill(0xff);
            let error = session(&fixture).prefill(&IDS).unwrap_err();
            assert_eq!(error, EngineError::NotFinite { position: 9 }, "{format:?}");
        }
    }
}
