//! Energy per request among others, against a simulated engine that knows the truth.

mod world;

use wattle_core::cost::{Cost, Weights};
use wattle_core::{Span, Watts};
use wattle_sim_server::EngineConfig;
use world::{Ask, Found, Past, SENSORS, serve, split};

/// Seven of ten ask 200 tokens for 400, three ask 4000 for 80.
fn mixed(n: usize) -> Vec<Ask> {
    // Not in step with the number in flight.
    (0..n as u64)
        .map(|i| match (i * 7919 + i / 3) % 10 < 7 {
            true => Ask { prompt: 150 + i * 37 % 100, answer: 350 + i * 53 % 100 },
            false => Ask { prompt: 3500 + i * 97 % 1000, answer: 60 + i * 31 % 40 },
        })
        .collect()
}

fn truth_of(config: &EngineConfig) -> Weights {
    let c = config.joules;
    let cost = Cost { fixed: c.fixed, prefill: c.prefill, decode: c.decode, context: c.context };
    Weights::calibrated(cost, &[[0.0; 4]; 4], None).with_idle(Watts(config.idle_watts), Watts(1.0))
}

struct Errors {
    mean: f64,
    covered: f64,
    width: f64,
}

fn errors(past: &Past, found: &Found) -> Errors {
    let n = found.ended.len() as f64;
    let of = |f: &dyn Fn(f64, f64, f64) -> f64| {
        let all = past.truth.iter().zip(&found.ended).map(|(truth, e)| {
            let share = e.share.unwrap();
            f(share.total().get(), truth.total(), share.bound.get())
        });
        all.sum::<f64>() / n
    };
    Errors {
        mean: of(&|got, truth, _| (got / truth - 1.0).abs()),
        covered: of(&|got, truth, bound| f64::from(u8::from((got - truth).abs() <= bound))),
        width: of(&|got, _, bound| bound / got),
    }
}

#[test]
fn look() {
    let config = EngineConfig::default();
    for at_once in [1, 8, 64] {
        let past = serve(&config, &mixed(if at_once == 1 { 40 } else { 400 }), at_once);
        for (name, weights) in [
            ("truth", truth_of(&config)),
            ("seconds", {
                let s = config.seconds;
                Weights::calibrated(
                    truth_of(&config).joules,
                    &[[0.0; 4]; 4],
                    Some(Cost { fixed: s.fixed, prefill: s.prefill, decode: s.decode, context: s.context }),
                )
                .with_idle(Watts(60.0), Watts(1.0))
            }),
            (
                "defaults",
                Weights::defaults(None, None, wattle_core::sensor::DeviceKind::Gpu)
                    .with_idle(Watts(60.0), Watts(1.0)),
            ),
        ] {
            let found = split(&past, weights);
            let e = errors(&past, &found);
            let sums: Vec<f64> = [
                (|s: &wattle_core::attribute::Share| s.prefill.get()) as fn(&_) -> f64,
                |s| s.decode.get(),
                |s| s.shared.get(),
            ]
            .iter()
            .map(|f| found.ended.iter().filter_map(|e| e.share).map(|s| f(&s)).sum())
            .collect();
            let t = |f: fn(&wattle_sim_server::Joules) -> f64| past.truth.iter().map(f).sum::<f64>();
            eprintln!(
                "{at_once} {name}: mean {:.3} covered {:.3} width {:.3}; prefill {:.3} decode {:.3} shared {:.3} residual {:e}",
                e.mean,
                e.covered,
                e.width,
                sums[0] / t(|j| j.prefill),
                sums[1] / t(|j| j.decode),
                sums[2] / t(|j| j.shared),
                found.ledger.residual().unwrap()
            );
            eprintln!("   work {:?}", found.work);
            for long in [false, true] {
                let (mut n, mut sum, mut abs) = (0.0, 0.0, 0.0);
                for ((t, e), a) in past
                    .truth
                    .iter()
                    .zip(&found.ended)
                    .zip(&past.asked)
                    .filter(|(_, a)| (a.prompt > 1000) == long)
                {
                    let r = e.share.unwrap().total().get() / t.total() - 1.0;
                    n += 1.0;
                    sum += r;
                    abs += r.abs();
                    let _ = a;
                }
                eprintln!("   long {long}: bias {:.3} abs {:.3}", sum / n, abs / n);
            }
        }
        let _ = Span::new;
        let _ = SENSORS;
    }
}
