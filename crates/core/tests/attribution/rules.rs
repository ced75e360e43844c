//! How others bill requests, on the same data.

use super::world::{Past, SENSORS};
use wattle_core::{Exchange, Span, Stamp};

type Rule = fn(&Past) -> Vec<f64>;

pub(crate) const RULES: [(&str, Rule); 3] = [
    ("energy per output token × length", by_tokens),
    ("equal time share", by_time),
    ("whole device while in flight", whole),
];

fn energy(past: &Past, span: Span) -> f64 {
    past.timeline.energy_of(&SENSORS, span).unwrap().value().get()
}

fn run(past: &Past) -> Span {
    let start = past.exchanges.iter().map(|e| e.sent).min().unwrap();
    Span::new(start, past.exchanges.iter().map(|e| e.done).max().unwrap())
}

fn by_tokens(past: &Past) -> Vec<f64> {
    let tokens = |e: &Exchange| e.tokens.len() as f64;
    let each = energy(past, run(past)) / past.exchanges.iter().map(tokens).sum::<f64>();
    past.exchanges.iter().map(|e| tokens(e) * each).collect()
}

/// At each moment the device's power goes in equal parts to those in flight.
fn by_time(past: &Past) -> Vec<f64> {
    let mut moments: Vec<Stamp> = past.exchanges.iter().flat_map(|e| [e.sent, e.done]).collect();
    moments.sort_unstable();
    moments.dedup();
    let mut shares = vec![0.0; past.exchanges.len()];
    for pair in moments.windows(2) {
        let there = |e: &Exchange| e.sent <= pair[0] && e.done >= pair[1];
        let of: Vec<usize> = (0..shares.len()).filter(|i| there(&past.exchanges[*i])).collect();
        let each = energy(past, Span::new(pair[0], pair[1])) / of.len().max(1) as f64;
        of.into_iter().for_each(|i| shares[i] += each);
    }
    shares
}

fn whole(past: &Past) -> Vec<f64> {
    past.exchanges.iter().map(|e| energy(past, e.span())).collect()
}
