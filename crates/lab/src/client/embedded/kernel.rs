//! Matrix times vector for each weight format: where nearly all of a token's time goes.
//!
//! The one thing to know: the loops are written once, as plain Rust, and compiled twice, for the
//! baseline of the target and for AVX2. Float sums have a fixed order and are never fused, so both
//! give the same bits: what a model answers does not depend on whether the CPU has AVX2.

use super::gguf::Format;

/// Values that share a scale; the block length of Q8_0 and Q4_0.
const BLOCK: usize = 32;

/// A weight matrix, repacked from the file once at load.
///
/// The file interleaves f16 scales with the quants. Decoding them in the inner loop would cost a third
/// of the speed (Q8_0 on one AVX2 core: 13 multiply-adds per ns against 19), so they become f32 in an
/// array of their own. Quants keep their size: four bits stay four bits. F16 becomes F32, since decoding
/// it in the inner loop would nearly double the time of models that fit a cache anyway.
#[derive(Debug)]
pub(super) struct Matrix {
    cols: usize,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    F32(Vec<f32>),
    Q8 { scales: Vec<f32>, quants: Vec<[i8; BLOCK]> },
    Q4 { scales: Vec<f32>, quants: Vec<[u8; BLOCK / 2]> },
}

impl Matrix {
    /// Repacks the bytes of a tensor whose rows have `cols` values.
    pub(super) fn repack(format: Format, bytes: &[u8], cols: usize) -> Self {
        let weights = match format {
            Format::F32 => Weights::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Format::F16 => Weights::F32(bytes.as_chunks().0.iter().map(half).collect()),
            Format::Q8_0 => {
                let blocks = bytes.as_chunks().0.iter();
                let (scales, quants) = blocks
                    .map(|[s0, s1, quants @ ..]: &[u8; 34]| (half(&[*s0, *s1]), quants.map(u8::cast_signed)))
                    .unzip();
                Weights::Q8 { scales, quants }
            }
            Format::Q4_0 => {
                let blocks = bytes.as_chunks().0.iter();
                let (scales, quants) =
                    blocks.map(|[s0, s1, quants @ ..]: &[u8; 18]| (half(&[*s0, *s1]), *quants)).unzip();
                Weights::Q4 { scales, quants }
            }
        };
        Self { cols, weights }
    }

    /// Writes row `index` to `out` in full precision.
    pub(super) fn row(&self, index: usize, out: &mut [f32]) {
        let values = index * self.cols..(index + 1) * self.cols;
        let blocks = values.start / BLOCK..values.end / BLOCK;
        match &self.weights {
            Weights::F32(weights) => out.copy_from_slice(&weights[values]),
            Weights::Q8 { scales, quants } => {
                dequantise(&scales[blocks.clone()], quants[blocks].iter().copied(), out);
            }
            Weights::Q4 { scales, quants } => {
                dequantise(&scales[blocks.clone()], quants[blocks].iter().map(nibbles), out);
            }
        }
    }
}

fn dequantise(scales: &[f32], quants: impl Iterator<Item = [i8; BLOCK]>, out: &mut [f32]) {
    for ((scale, quants), out) in scales.iter().zip(quants).zip(out.as_chunks_mut::<BLOCK>().0) {
        *out = quants.map(|q| scale * f32::from(q));
    }
}

/// A block of activations as Q8_0: a value is `scale` × `quants`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    scale: f32,
    /// −127 to 127, already widened to what the multiplication needs.
    quants: [i16; BLOCK],
}

/// A vector to multiply with, as f32 and as Q8_0: the format of the matrix decides which is used.
#[derive(Debug)]
pub(super) struct Operand {
    cpu: Cpu,
    values: Vec<f32>,
    blocks: Vec<Block>,
}

impl Operand {
    /// An empty vector with room for `capacity` values.
    pub(super) fn new(cpu: Cpu, capacity: usize) -> Self {
        let blocks = Vec::with_capacity(capacity.div_ceil(BLOCK));
        Self { cpu, values: Vec::with_capacity(capacity), blocks }
    }

    /// Replaces the vector.
    pub(super) fn load(&mut self, values: impl Iterator<Item = f32>) {
        self.values.clear();
        self.values.extend(values);
        self.blocks.resize(self.values.len().div_ceil(BLOCK), Block { scale: 0.0, quants: [0; BLOCK] });
        quantise(&self.values, &mut self.blocks);
    }

    /// `out` = `matrix` × this vector.
    pub(super) fn times(&self, matrix: &Matrix, out: &mut [f32]) {
        match self.cpu.avx2 {
            #[cfg(target_arch = "x86_64")]
            #[allow(unsafe_code)]
            // SAFETY: only `Cpu::detect` sets `avx2`, so this CPU has it.
            true => unsafe { multiply_avx2(matrix, self, out) },
            _ => multiply(matrix, self, out),
        }
    }
}

/// The instructions that the kernels may use. AVX2 can be had only by finding it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cpu {
    avx2: bool,
}

impl Cpu {
    /// What every CPU of the target has: SSE2 on x86-64, NEON on aarch64.
    #[cfg(test)]
    pub(super) const BASELINE: Self = Self { avx2: false };

    /// Asks the CPU.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        return Self { avx2: is_x86_feature_detected!("avx2") };
        #[cfg(not(target_arch = "x86_64"))]
        Self { avx2: false }
    }
}

fn quantise(values: &[f32], blocks: &mut [Block]) {
    // Adding 1.5 × 2²³ leaves a small number, rounded to nearest, in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    for (values, block) in values.chunks(BLOCK).zip(blocks) {
        // The bits of positive floats sort like the floats, with NaN on top: damage is not lost.
        let bits = values.iter().fold(0, |max, v| v.abs().to_bits().cast_signed().max(max));
        let largest = f32::from_bits(bits.cast_unsigned());
        // llama.cpp rounds this scale to f16; here f32 costs nothing and is closer.
        block.scale = largest / 127.0;
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        block.quants = [0; BLOCK];
        for (quant, value) in block.quants.iter_mut().zip(values) {
            *quant = (value * inverse + ROUND).to_bits() as i16;
        }
    }
}

/// The same loops, inlined into a function for which LLVM may use AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn multiply_avx2(matrix: &Matrix, input: &Operand, out: &mut [f32]) {
    multiply(matrix, input, out);
}

#[inline(always)]
fn multiply(matrix: &Matrix, input: &Operand, out: &mut [f32]) {
    let Operand { values, blocks, .. } = input;
    let n = blocks.len();
    match &matrix.weights {
        Weights::F32(weights) => {
            for (row, out) in weights.chunks_exact(matrix.cols).zip(out) {
                *out = dot(row, values);
            }
        }
        Weights::Q8 { scales, quants } => {
            for ((quants, scales), out) in quants.chunks_exact(n).zip(scales.chunks_exact(n)).zip(out) {
                *out = dot_blocks(quants, scales, blocks, |quants| *quants);
            }
        }
        Weights::Q4 { scales, quants } => {
            for ((quants, scales), out) in quants.chunks_exact(n).zip(scales.chunks_exact(n)).zip(out) {
                *out = dot_blocks(quants, scales, blocks, nibbles);
            }
        }
    }
}

/// Integer sums within a block are exact in any order, which is what lets LLVM vectorise them.
///
/// They cannot overflow, 32 × 128 × 127 being far from it. Saying so by `wrapping` keeps the checks of
/// debug builds, under which nothing is vectorised, out of the loop.
#[inline(always)]
fn dot_blocks<Q>(quants: &[Q], scales: &[f32], input: &[Block], unpack: impl Fn(&Q) -> [i8; BLOCK]) -> f32 {
    let mut total = 0.0;
    for ((quants, scale), input) in quants.iter().zip(scales).zip(input) {
        let quants = unpack(quants);
        let products =
            quants.iter().zip(&input.quants).map(|(w, x)| i32::from(*w).wrapping_mul(i32::from(*x)));
        let sum = products.fold(0, i32::wrapping_add);
        total += scale * input.scale * sum as f32;
    }
    total
}

/// The dot product of two vectors of one length. The sum of floats depends on its order, so the
/// order is fixed here: eight lanes, an AVX2 register (with sixteen, LLVM spills), then their tree.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a * b;
    }
    for width in [4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// A Q4_0 block's values: low nibbles first, then high ones, each biased by 8.
#[inline(always)]
fn nibbles(packed: &[u8; BLOCK / 2]) -> [i8; BLOCK] {
    let mut values = [0; BLOCK];
    let (low, high) = values.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        *low = (byte & 15).cast_signed().wrapping_sub(8);
        *high = (byte >> 4).cast_signed().wrapping_sub(8);
    }
    values
}

/// A little-endian IEEE half as f32, exactly. Shifted into place its exponent is short by 127 − 15, which a
/// multiplication puts right, for subnormals too; infinity and NaN have to be told apart.
fn half(bytes: &[u8; 2]) -> f32 {
    let bits = u16::from_le_bytes(*bytes);
    const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let shifted = u32::from(bits & 0x7fff) << 13;
    let finite = (f32::from_bits(shifted) * REBIAS).to_bits();
    let magnitude = if bits & 0x7c00 == 0x7c00 { shifted | 0x7f80_0000 } else { finite };
    f32::from_bits(magnitude | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{FORMATS, random_tensor};
    use super::super::sample::SplitMix64;
    use super::*;

    fn activations(n: usize) -> Vec<f32> {
        let mut random = SplitMix64(7);
        (0..n).map(|_| (random.fraction() + random.fraction() + random.fraction() - 1.5) as f32).collect()
    }

    fn operand(cpu: Cpu, values: &[f32]) -> Operand {
        let mut operand = Operand::new(cpu, values.len());
        operand.load(values.iter().copied());
        operand
    }

    #[test]
    fn every_half_is_decoded_exactly() {
        for bits in 0..=u16::MAX {
            let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff) / 1024.0);
            let magnitude = match exponent {
                0 => mantissa * 2_f64.powi(-14),
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + mantissa) * 2_f64.powi(exponent - 15),
            };
            let expected = if bits >> 15 == 1 { -magnitude } else { magnitude };
            let decoded = half(&bits.to_le_bytes());
            assert!(decoded == expected as f32 || decoded.is_nan() && expected.is_nan(), "{bits:#06x}");
            assert_eq!(decoded.is_sign_negative(), bits >> 15 == 1);
        }
    }

    #[test]
    fn activations_are_rounded_to_the_nearest_step() {
        let values = activations(100);
        let operand = operand(Cpu::detect(), &values);
        assert_eq!(operand.blocks.len(), 4);
        for (block, values) in operand.blocks.iter().zip(values.chunks(BLOCK)) {
            assert_eq!(block.quants.iter().map(|q| q.abs()).max(), Some(127));
            for (quant, value) in block.quants.iter().zip(values) {
                let error = (f32::from(*quant) * block.scale - value).abs();
                assert!(error <= block.scale * 0.5001, "{value} became {quant} × {}", block.scale);
            }
        }
    }

    #[test]
    fn an_activation_that_is_not_finite_spoils_the_product() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for format in FORMATS {
                let (bytes, _) = random_tensor(format, 2, 64, &mut SplitMix64(3));
                let mut values = activations(64);
                values[40] = bad;
                let mut out = [0.0; 2];
                operand(Cpu::detect(), &values).times(&Matrix::repack(format, &bytes, 64), &mut out);
                assert!(out.iter().all(|sum| !sum.is_finite()), "{format:?} hid {bad}: {out:?}");
            }
        }
    }

    #[test]
    fn a_product_is_the_sum_over_what_the_blocks_stand_for() {
        for format in FORMATS {
            let (rows, cols) = (5, if format.block().0 == 1 { 101 } else { 160 });
            let (bytes, weights) = random_tensor(format, rows, cols, &mut SplitMix64(5));
            let matrix = Matrix::repack(format, &bytes, cols);
            let operand = operand(Cpu::detect(), &activations(cols));
            let quantised =
                operand.blocks.iter().flat_map(|b| b.quants.map(|q| f64::from(b.scale) * f64::from(q)));
            let plain = operand.values.iter().map(|v| f64::from(*v));
            let input: Vec<f64> = if format.block().0 == 1 { plain.collect() } else { quantised.collect() };

            let mut out = vec![0.0; rows];
            operand.times(&matrix, &mut out);
            for (i, (sum, weights)) in out.iter().zip(weights.chunks(cols)).enumerate() {
                let exact: f64 = weights.iter().zip(&input).map(|(w, x)| w * x).sum();
                // A few roundings of f32, each 6e-8 of terms that add up to at most `size`.
                let size: f64 = weights.iter().zip(&input).map(|(w, x)| (w * x).abs()).sum();
                assert!((f64::from(*sum) - exact).abs() < 3e-7 * size, "{format:?}: {sum} is not {exact}");
                let mut row = vec![0.0; cols];
                matrix.row(i, &mut row);
                assert!(row.iter().zip(weights).all(|(a, b)| *a == *b as f32), "{format:?}: row {i}");
            }
        }
    }

    #[test]
    fn avx2_and_the_baseline_give_the_same_bits() {
        for format in FORMATS {
            let (rows, cols) = (67, 416);
            let (bytes, _) = random_tensor(format, rows, cols, &mut SplitMix64(9));
            let matrix = Matrix::repack(format, &bytes, cols);
            let [detected, baseline] = [Cpu::detect(), Cpu::BASELINE].map(|cpu| {
                let mut out = vec![0.0; rows];
                operand(cpu, &activations(cols)).times(&matrix, &mut out);
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            assert_eq!(detected, baseline, "{format:?}");
        }
    }
}
