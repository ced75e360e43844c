//! Power curves whose energy is known in closed form: straight pieces, so that the integral is a sum of trapezoids.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::Rng;

/// A uniform number in `low..high`.
pub(crate) fn uniform(rng: &mut Pcg64Mcg, low: f64, high: f64) -> f64 {
    low + (high - low) * (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// What the simulated device does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// One level.
    Constant,
    /// Up and down between 100 and 600 W in 20 s: slow against every refresh.
    Ramp,
    /// 400 W and 100 W in turn, each for 0.3 to 1.5 s.
    Square,
    /// Requests: prefill at 700 W for 50 to 300 ms, decode at 350 W for 0.5 to 3 s, idle at 90 W for 0.2 to 2 s.
    Bursts,
    /// 400 W and 100 W, each for 15 to 25 ms: faster than most refreshes, so that no counter shows it.
    Flicker,
}

impl Load {
    /// The curves a device is likely to draw; every bar is over these.
    pub(crate) const REALISTIC: [Load; 4] = [Load::Constant, Load::Ramp, Load::Square, Load::Bursts];

    /// The pieces of one cycle: seconds, watts at the start, watts at the end.
    fn cycle(self, rng: &mut Pcg64Mcg) -> Vec<(f64, f64, f64)> {
        match self {
            Load::Constant => vec![(1.0, 350.0, 350.0)],
            Load::Ramp => vec![(10.0, 100.0, 600.0), (10.0, 600.0, 100.0)],
            Load::Square => {
                vec![(uniform(rng, 0.3, 1.5), 400.0, 400.0), (uniform(rng, 0.3, 1.5), 100.0, 100.0)]
            }
            Load::Bursts => vec![
                (uniform(rng, 0.05, 0.3), 700.0, 700.0),
                (uniform(rng, 0.5, 3.0), 350.0, 350.0),
                (uniform(rng, 0.2, 2.0), 90.0, 90.0),
            ],
            Load::Flicker => {
                vec![(uniform(rng, 0.015, 0.025), 400.0, 400.0), (uniform(rng, 0.015, 0.025), 100.0, 100.0)]
            }
        }
    }
}

/// Where a straight piece begins.
struct Piece {
    at: f64,
    watts: f64,
    /// Watts per second.
    slope: f64,
    /// Joules before it.
    before: f64,
}

/// Power over time, from 0 s on.
pub(crate) struct Curve(Vec<Piece>);

impl Curve {
    /// A curve of at least `seconds`, its phase drawn too.
    pub(crate) fn new(load: Load, seconds: f64, rng: &mut Pcg64Mcg) -> Self {
        let mut pieces = Vec::new();
        let (mut at, mut before) = (-uniform(rng, 0.0, 3.0), 0.0);
        while at < seconds {
            for (length, from, to) in load.cycle(rng) {
                pieces.push(Piece { at, watts: from, slope: (to - from) / length, before });
                at += length;
                before += length * (from + to) / 2.0;
            }
        }
        Self(pieces)
    }

    /// 300 W between two moments, 50 W before and after: work that begins and ends with the window it is measured in.
    pub(crate) fn alone(from: f64, to: f64) -> Self {
        let piece = |at: f64, watts: f64, before: f64| Piece { at, watts, slope: 0.0, before };
        let before = 50.0 * from;
        Self(vec![
            piece(0.0, 50.0, 0.0),
            piece(from, 300.0, before),
            piece(to, 50.0, before + 300.0 * (to - from)),
        ])
    }

    /// Joules up to `t`, from an arbitrary zero.
    fn total(&self, t: f64) -> f64 {
        let piece = &self.0[self.0.partition_point(|p| p.at <= t).saturating_sub(1)];
        let gone = t - piece.at;
        piece.before + gone * (piece.watts + piece.slope * gone / 2.0)
    }

    /// The exact energy between two moments.
    pub(crate) fn joules(&self, from: f64, to: f64) -> f64 {
        self.total(to) - self.total(from)
    }
}
