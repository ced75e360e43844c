use super::*;
use crate::exchange::{Finish, Outcome};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// Noise of unit variance whose neighbours are alike by so much (an AR(1)).
pub(super) struct Noise {
    rng: Pcg64Mcg,
    likeness: f64,
    last: f64,
}

impl Noise {
    pub(super) fn new(seed: u64, likeness: f64) -> Self {
        let mut noise = Self { rng: Pcg64Mcg::seed_from_u64(seed), likeness, last: 0.0 };
        (0..1000).for_each(|_| noise.last = noise.next());
        noise
    }

    pub(super) fn next(&mut self) -> f64 {
        // Twelve uniform ones are as good as normal.
        let uniform = |rng: &mut Pcg64Mcg| (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let normal = (0..12).map(|_| uniform(&mut self.rng)).sum::<f64>() - 6.0;
        self.last = self.likeness * self.last + (1.0 - self.likeness.powi(2)).sqrt() * normal;
        self.last
    }
}

/// Fills up until `up`, is level, drains from `down` on.
fn plateau(n: usize, up: usize, down: usize, noise: &mut Noise) -> Vec<f64> {
    let shape = |i: usize| match i {
        i if i < up => 40.0 + 260.0 * i as f64 / up as f64,
        i if i >= down => 300.0 - 260.0 * (i - down) as f64 / (n - down) as f64,
        _ => 300.0,
    };
    (0..n).map(|i| shape(i) + 6.0 * noise.next()).collect()
}

#[test]
fn noise_around_a_constant_is_hardly_cut_and_hardly_ever_called_unsteady() {
    for likeness in [0.0, 0.5, 0.9] {
        let mut noise = Noise::new(3, likeness);
        let (mut cut, mut missed) = (0, 0);
        for _ in 0..300 {
            let series: Vec<f64> = (0..200).map(|_| 300.0 + 30.0 * noise.next()).collect();
            let found = find(&[&series]);
            cut += 200 - found.bins.len();
            missed += u32::from(!found.reached);
        }
        let mean = cut as f64 / 300.0;
        println!("{likeness}: {mean} of 200 bins cut, {missed} of 300 not steady");
        assert!(mean < 10.0, "{likeness}: {mean} of 200 bins");
        assert!(missed <= 8, "{likeness}: {missed} of 300");
    }
}

#[test]
fn a_constant_is_not_cut_at_all() {
    assert_eq!(find(&[&[16.0; 90], &[0.1 + 0.2; 90]]), Found { bins: 0..90, reached: true });
}

#[test]
fn what_fills_up_and_what_drains_is_cut_near_its_end() {
    for likeness in [0.0, 0.8] {
        let mut noise = Noise::new(9, likeness);
        for _ in 0..100 {
            let found = find(&[&plateau(300, 60, 270, &mut noise)]);
            assert!(found.reached, "{likeness}");
            let (start, end) = (found.bins.start, found.bins.end);
            assert!((40..=80).contains(&start) && (250..=275).contains(&end), "{likeness}: {found:?}");
        }
    }
}

/// In flight on a machine that others use, too: little is even about it, and there are few bins.
#[test]
fn noise_hides_no_ramp() {
    let mut noise = Noise::new(11, 0.85);
    let (mut trimmed, mut missed) = (0, 0);
    for _ in 0..300 {
        let series: Vec<f64> =
            plateau(93, 24, 88, &mut noise).iter().map(|x| x + 24.0 * noise.next()).collect();
        let found = find(&[&series]);
        trimmed += u32::from(found.reached && found.bins.start >= 10);
        missed += u32::from(found.reached && found.bins.start < 10);
    }
    println!("{trimmed} of 300 cut, {missed} taken for steady as they are");
    assert!(trimmed >= 260 && missed == 0, "{trimmed} of 300 cut, {missed} taken for steady as they are");
}

#[test]
fn the_longer_cut_of_two_series_counts() {
    let mut noise = Noise::new(4, 0.3);
    let (power, in_flight) = (plateau(300, 80, 290, &mut noise), plateau(300, 20, 250, &mut noise));
    let found = find(&[&power, &in_flight]);
    assert!(found.reached, "{found:?}");
    assert!((70..=100).contains(&found.bins.start) && (230..=256).contains(&found.bins.end), "{found:?}");
}

#[test]
fn what_never_settles_is_not_steady() {
    let mut noise = Noise::new(2, 0.5);
    let rising: Vec<f64> = (0..200).map(|i| 100.0 + f64::from(i) + 3.0 * noise.next()).collect();
    let late: Vec<f64> = (0..200).map(|i| if i < 140 { 100.0 } else { 300.0 } + 3.0 * noise.next()).collect();
    for series in [&rising, &late] {
        assert_eq!(find(&[series]), Found { bins: 0..200, reached: false });
    }
}

/// Each series has five bins that stand out only where the window begins: one more is cut in each round.
#[test]
fn what_is_still_cut_in_the_last_round_is_not_steady() {
    let pulse =
        |j: usize| (0..200_usize).map(|i| if i.div_ceil(5) == j + 1 { 108.0 } else { 100.0 }).collect();
    for (series, found) in
        [(5, Found { bins: 26..200, reached: true }), (14, Found { bins: 0..200, reached: false })]
    {
        let all: Vec<Vec<f64>> = (0..series).map(pulse).collect();
        let all: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
        assert_eq!(find(&all), found, "{series}");
    }
}

fn exchange(from_ms: u64, until_ms: u64, tokens: u64) -> Exchange {
    let at = |ms: u64| Stamp::from_nanos(ms * 1_000_000);
    let mut exchange = Exchange::due(at(from_ms));
    exchange.done = at(until_ms);
    exchange.tokens = (1..=4).map(|i| at(from_ms + (until_ms - from_ms) * i / 4)).collect();
    exchange.first_token = Some(exchange.tokens[0]);
    exchange.usage.completion = Some(tokens);
    exchange.outcome = Outcome::Ok { finish: Finish::Stop };
    exchange
}

#[test]
fn a_chart_has_every_token_and_every_answer_where_it_came() {
    let mut flow = Flow::default();
    // Two at once, one after the other, for ten seconds, 20 tokens in 4 pieces each.
    for i in 0..20 {
        flow.push(&exchange(1000 + i * 500, 1500 + i * 500, 20));
        flow.push(&exchange(1000 + i * 500, 1500 + i * 500, 20));
    }
    let span = Span::new(Stamp::from_nanos(1_000_000_000), Stamp::from_nanos(11_000_000_000));
    let chart = flow.clone().chart(span, 0.1).unwrap();
    assert_eq!(chart.len(), 80, "eighths of a second");
    assert!(chart.iter().all(|b| (b.in_flight - 2.0).abs() < 1e-9), "{chart:?}");
    let sum = |of: fn(&Bin) -> f64| chart.iter().map(of).sum::<f64>();
    assert_eq!((sum(|b| b.tokens), sum(|b| b.answers)), (800.0, 40.0));
    assert!(flow.clone().chart(span, 0.5).is_none(), "twenty bins are too few");
    let short = Span::new(span.start(), Stamp::from_nanos(2_900_000_000));
    assert!(flow.chart(short, 0.0).is_none(), "two seconds are the least");
}
