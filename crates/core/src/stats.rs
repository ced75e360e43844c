//! Intervals in flat memory: batch means for (autocorrelated) sums and their ratios, a histogram for percentiles, Wilson for shares.

/// At most this many batches; when full, neighbours are joined. Between half of it and all of it stand for any number of
/// samples, each batch long enough that neighbouring samples' likeness stays inside it.
const BATCHES: usize = 64;

/// Sums of `C` columns, kept by batch so that a ratio of sums has an interval.
#[derive(Debug, Clone)]
pub struct Batches<const C: usize> {
    full: Vec<[f64; C]>,
    open: [f64; C],
    in_open: u64,
    per_batch: u64,
    samples: u64,
}

impl<const C: usize> Default for Batches<C> {
    fn default() -> Self {
        Self { full: Vec::with_capacity(BATCHES), open: [0.0; C], in_open: 0, per_batch: 1, samples: 0 }
    }
}

/// A figure and the half-width of its 95 % interval, unknown with fewer than two batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The figure.
    pub value: f64,
    /// Half-width.
    pub half: Option<f64>,
}

impl<const C: usize> Batches<C> {
    /// Adds one sample.
    pub fn push(&mut self, row: [f64; C]) {
        for (sum, x) in self.open.iter_mut().zip(row) {
            *sum += x;
        }
        self.samples += 1;
        self.in_open += 1;
        if self.in_open == self.per_batch {
            self.full.push(std::mem::replace(&mut self.open, [0.0; C]));
            self.in_open = 0;
            if self.full.len() == BATCHES {
                self.full = self
                    .full
                    .chunks(2)
                    .map(|pair| std::array::from_fn(|c| pair[0][c] + pair[1][c]))
                    .collect();
                self.per_batch *= 2;
            }
        }
    }

    /// How many samples were added.
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Sum of a column.
    pub fn sum(&self, column: usize) -> f64 {
        self.full.iter().map(|b| b[column]).sum::<f64>() + self.open[column]
    }

    /// Ratio of the sums of two columns, by linearisation over batches; `None` if the divisor is 0.
    pub fn ratio(&self, over: usize, under: usize) -> Option<Interval> {
        let divisor = self.sum(under);
        if divisor == 0.0 {
            return None;
        }
        let value = self.sum(over) / divisor;
        let open = (self.in_open > 0).then_some(&self.open);
        let residuals: Vec<f64> = self.full.iter().chain(open).map(|b| b[over] - value * b[under]).collect();
        let n = residuals.len();
        let half = (n >= 2).then(|| {
            let squares: f64 = residuals.iter().map(|r| r * r).sum();
            t_975(n - 1) * (squares * n as f64 / (n - 1) as f64).sqrt() / divisor.abs()
        });
        Some(Interval { value, half })
    }
}

/// 97.5 % quantile of Student's t (Abramowitz & Stegun 26.7.5; exact below four degrees of freedom).
pub fn t_975(degrees: usize) -> f64 {
    const Z: f64 = 1.959_963_985;
    match degrees {
        0 => f64::INFINITY,
        1 => 12.706_204_736,
        2 => 4.302_652_730,
        3 => 3.182_446_305,
        _ => {
            let n = degrees as f64;
            let g1 = (Z.powi(3) + Z) / 4.0;
            let g2 = (5.0 * Z.powi(5) + 16.0 * Z.powi(3) + 3.0 * Z) / 96.0;
            let g3 = (3.0 * Z.powi(7) + 19.0 * Z.powi(5) + 17.0 * Z.powi(3) - 15.0 * Z) / 384.0;
            Z + g1 / n + g2 / n.powi(2) + g3 / n.powi(3)
        }
    }
}

/// 95 % Wilson interval of `hits` out of `n`.
pub fn wilson(hits: f64, n: f64) -> Option<(f64, f64)> {
    const Z2: f64 = 1.959_963_985 * 1.959_963_985;
    (n > 0.0).then(|| {
        let p = hits / n;
        let middle = p + Z2 / (2.0 * n);
        let half = (Z2 * (p * (1.0 - p) + Z2 / (4.0 * n)) / n).sqrt();
        let scale = 1.0 + Z2 / n;
        (((middle - half) / scale).max(0.0), ((middle + half) / scale).min(1.0))
    })
}

/// Buckets per doubling: neighbouring bucket centres differ by 0.27 %.
const PER_OCTAVE: f64 = 256.0;
/// Smallest value told apart, in the unit of the samples (seconds: 1 ns).
const SMALLEST: f64 = 1e-9;
const BUCKETS: usize = 256 * 64;

/// A histogram of positive values with logarithmic buckets: percentiles to 0.14 % in flat memory.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    n: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], n: 0 }
    }
}

impl Histogram {
    /// Adds a value; what is below 1e-9 counts as that.
    pub fn push(&mut self, value: f64) {
        let bucket = ((value.max(SMALLEST) / SMALLEST).log2() * PER_OCTAVE) as usize;
        self.counts[bucket.min(BUCKETS - 1)] += 1;
        self.n += 1;
    }

    /// The value below which the part `q` of all samples lies.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let rank = ((self.n as f64 * q).ceil() as u64).clamp(1, self.n.max(1));
        let mut seen = 0;
        let bucket = self.counts.iter().position(|c| {
            seen += c;
            seen >= rank
        })?;
        Some(SMALLEST * ((bucket as f64 + 0.5) / PER_OCTAVE).exp2())
    }

    /// The ends of a 95 % interval of that value, by ranks: how many of `n` samples lie below it is binomial (Conover, Practical
    /// Nonparametric Statistics, 3.2). An end beyond all samples is unknown.
    pub fn quantile_interval(&self, q: f64) -> (Option<f64>, Option<f64>) {
        const Z: f64 = 1.959_963_985;
        let n = self.n as f64;
        let spread = Z * (n * q * (1.0 - q)).sqrt();
        let (low, high) = ((n * q - spread).floor(), (n * q + spread).ceil() + 1.0);
        let at = |rank: f64| ((1.0..=n).contains(&rank)).then(|| self.quantile((rank - 0.5) / n)).flatten();
        (at(low), at(high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_pcg::Pcg64Mcg;
    use rand_pcg::rand_core::{Rng, SeedableRng};

    fn uniform(rng: &mut Pcg64Mcg) -> f64 {
        (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn t_quantiles_agree_with_the_tables() {
        for (degrees, table) in
            [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
        {
            assert!((t_975(degrees) - table).abs() < 0.01, "{degrees}: {}", t_975(degrees));
        }
    }

    #[test]
    fn wilson_agrees_with_the_textbook() {
        let (low, high) = wilson(8.0, 10.0).unwrap();
        assert!((low - 0.4902).abs() < 1e-3 && (high - 0.9433).abs() < 1e-3, "{low} {high}");
        assert_eq!(wilson(0.0, 0.0), None);
    }

    #[test]
    fn a_ratio_is_of_sums_and_its_interval_covers_the_truth_as_often_as_it_says() {
        let mut rng = Pcg64Mcg::seed_from_u64(7);
        let mut inside = 0;
        for _ in 0..1000 {
            let mut batches = Batches::<2>::default();
            for _ in 0..300 {
                let tokens = 1.0 + 99.0 * uniform(&mut rng);
                batches.push([tokens * 0.5 * (0.5 + uniform(&mut rng)), tokens]);
            }
            let r = batches.ratio(0, 1).unwrap();
            inside += u32::from((r.value - 0.5).abs() <= r.half.unwrap());
        }
        assert!((930..=970).contains(&inside), "{inside} of 1000");
    }

    #[test]
    fn likeness_between_neighbours_widens_the_interval() {
        let mut rng = Pcg64Mcg::seed_from_u64(3);
        let (mut like, mut free) = (Batches::<2>::default(), Batches::<2>::default());
        let mut level = 0.0;
        for _ in 0..20_000 {
            level = 0.95 * level + uniform(&mut rng) - 0.5;
            like.push([level, 1.0]);
            free.push([uniform(&mut rng) - 0.5, 1.0]);
        }
        let half = |b: &Batches<2>| b.ratio(0, 1).unwrap().half.unwrap();
        // An AR(1) of 0.95 is worth 39 times fewer samples: its mean varies 20 times as much as that of its innovations.
        assert!(half(&like) / half(&free) > 10.0);
    }

    #[test]
    fn memory_stays_flat() {
        let mut batches = Batches::<1>::default();
        for _ in 0..1_000_000 {
            batches.push([1.0]);
        }
        assert!(batches.full.len() < BATCHES);
        assert_eq!((batches.sum(0), batches.samples()), (1e6, 1_000_000));
    }

    #[test]
    fn percentiles_are_right_to_their_precision() {
        let mut h = Histogram::default();
        assert_eq!(h.quantile(0.5), None);
        (1..=10_000).for_each(|i| h.push(f64::from(i) * 1e-4));
        for (q, truth) in [(0.5, 0.5), (0.9, 0.9), (0.99, 0.99), (1.0, 1.0)] {
            let got = h.quantile(q).unwrap();
            assert!((got / truth - 1.0).abs() < 0.002, "{q}: {got}");
        }
    }

    #[test]
    fn the_interval_of_a_percentile_covers_it_as_often_as_it_says() {
        let mut rng = Pcg64Mcg::seed_from_u64(11);
        for (q, n) in [(0.5, 20), (0.5, 500), (0.99, 2000)] {
            let mut inside = 0;
            for _ in 0..400 {
                let mut h = Histogram::default();
                (0..n).for_each(|_| h.push(1.0 + uniform(&mut rng)));
                let (low, high) = h.quantile_interval(q);
                // Buckets are 0.27 % wide.
                inside += u32::from(low.unwrap() <= (1.0 + q) * 1.003 && high.unwrap() >= (1.0 + q) / 1.003);
            }
            assert!(inside >= 372, "{q} of {n}: {inside} of 400");
        }
        let mut few = Histogram::default();
        (0..50).for_each(|i| few.push(1.0 + f64::from(i)));
        let (low, high) = few.quantile_interval(0.99);
        assert!(low.is_some() && high.is_none(), "nothing is known of what lies beyond the last");
    }
}
