//! Facts about windows on hand-made readings; the accuracy study is in `tests/accuracy`.

use super::*;
use crate::estimate::Method;
use crate::sensor::{Device, DeviceKind, Kind, Perimeter, Quantity, Trust};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const ID: SensorId = SensorId(0);

fn table(quantity: Quantity, kind: Kind) -> Vec<Sensor> {
    vec![Sensor {
        name: "test".into(),
        source: "test".into(),
        device: Device { kind: DeviceKind::Gpu, id: "0".into(), name: "test".into() },
        quantity,
        perimeter: Perimeter::Device,
        kind,
        trust: Trust::Measured { gain: 0.0 },
        quantum: 0.0,
        averaged_s: 0.0,
    }]
}

fn counter(wrap: Option<f64>) -> Timeline {
    Timeline::new(&table(Quantity::Energy, Kind::Counter { wrap }))
}

fn gauge() -> Timeline {
    Timeline::new(&table(Quantity::Power, Kind::Gauge))
}

fn put(t: &mut Timeline, at: u64, value: impl Into<Option<f64>>) {
    t.push(&Reading { sensor: ID, at: Stamp::from_nanos(at), value: value.into() });
}

fn span(a: u64, b: u64) -> Span {
    Span::new(Stamp::from_nanos(a), Stamp::from_nanos(b))
}

fn joules(t: &Timeline, a: u64, b: u64) -> f64 {
    t.energy(ID, span(a, b)).unwrap().value().get()
}

/// 100 W through a counter refreshed every 100 ms and polled every 5 ms.
fn staircase(wrap: Option<f64>) -> Timeline {
    let mut t = counter(wrap);
    for poll in 0..600u64 {
        let at = poll * 5 * MS + 1;
        let ticks = at / (100 * MS);
        let raw = 10.0 * ticks as f64;
        put(&mut t, at, wrap.map_or(raw, |w| raw % w));
    }
    t
}

/// 50 W, and 300 W from `from` to `to` (in ms), through a counter refreshed every 100 ms.
fn work(from: u64, to: u64) -> Timeline {
    let mut t = counter(None);
    for poll in 0..600u64 {
        let at = poll * 5;
        let refreshed = (at / 100 * 100) as f64;
        let busy = (refreshed - from as f64).max(0.0) - (refreshed - to as f64).max(0.0);
        put(&mut t, at * MS, (50.0 * refreshed + 250.0 * busy) * 1e-3);
    }
    t
}

#[test]
fn where_work_is_known_to_begin_and_end_the_curve_is_bent() {
    for (from, to) in [(1030, 1870), (1030, 1070), (1150, 1260)] {
        let mut t = work(from, to);
        let truth = 0.3 * (to - from) as f64;
        let even = (joules(&t, from * MS, to * MS) - truth).abs();
        t.mark(Stamp::from_nanos(from * MS));
        t.mark(Stamp::from_nanos(to * MS));
        let bent = (joules(&t, from * MS, to * MS) - truth).abs();
        // A corner lies up to half a poll from its refresh.
        assert!(bent < 2.0 && even > 3.0 * bent, "{from} to {to}: {bent} J off, {even} J without");
    }
}

#[test]
fn a_mark_where_nothing_changed_bends_nothing() {
    let mut t = staircase(None);
    let before = joules(&t, 537 * MS, 1537 * MS);
    [537, 1000, 1537].into_iter().for_each(|m| t.mark(Stamp::from_nanos(m * MS)));
    assert!((joules(&t, 537 * MS, 1537 * MS) - before).abs() < 0.5);
    // Power jumped in the middle of a step, and the mark is at its end: a change there does not explain the step.
    let mut t = work(1050, 1850);
    let (a, b) = (joules(&t, 500 * MS, 1090 * MS), Stamp::from_nanos(1090 * MS));
    t.mark(b);
    assert_eq!(joules(&t, 500 * MS, 1090 * MS), a);
}

#[test]
fn a_staircase_is_interpolated_to_the_edges() {
    let t = staircase(None);
    let e = t.energy(ID, span(537 * MS, 1537 * MS)).unwrap();
    assert!((e.value().get() - 100.0).abs() < 0.3, "{e:?}");
    assert!((e.value().get() - 100.0).abs() <= e.bound().get());
    assert!(e.bound().get() < 0.5, "four stamps of ±2.5 ms at even power: {e:?}");
    assert_eq!(e.method(), Method::Counter);
    assert_eq!(e.coverage(), 1.0);
}

#[test]
fn a_window_beyond_what_is_covered_knows_how_unsure_the_outermost_corners_are() {
    let e = staircase(None).energy(ID, span(0, 5_000 * MS)).unwrap();
    // ±2.5 ms at 100 W, at 95 %, twice.
    let corners = 1.96 * 0.25 / 3f64.sqrt() * std::f64::consts::SQRT_2;
    assert!((e.bound().get() - corners).abs() < 1e-9, "{e:?}");
}

#[test]
fn a_change_of_power_is_in_the_bound_where_an_edge_falls_into_its_step() {
    let mut t = counter(None);
    let mut raw = 0.0;
    for poll in 0..400u64 {
        if poll % 20 == 0 {
            raw += if poll < 200 { 10.0 } else { 40.0 };
        }
        put(&mut t, poll * 5 * MS, raw);
    }
    let bound = |end: u64| t.energy(ID, span(300 * MS, end * MS)).unwrap().bound().get();
    assert!(bound(950) > 5.0 && bound(750) < 1.0, "{} {}", bound(950), bound(750));
}

#[test]
fn a_gauge_that_changes_leaves_more_open_than_a_still_one() {
    let bound = |high: f64| {
        let mut t = gauge();
        for i in 0..50u64 {
            put(&mut t, i * 100 * MS, if i % 2 == 0 { 100.0 } else { high });
        }
        t.energy(ID, span(500 * MS, 3_500 * MS)).unwrap().bound().get()
    };
    assert_eq!(bound(100.0), 0.0);
    // Thirty changes of 200 W, each somewhere in 100 ms.
    assert!((50.0..200.0).contains(&bound(300.0)), "{}", bound(300.0));
}

#[test]
fn a_wrapped_counter_keeps_counting() {
    let (plain, wrapped) = (staircase(None), staircase(Some(65.0)));
    let window = (300 * MS, 2700 * MS);
    assert!((joules(&plain, window.0, window.1) - joules(&wrapped, window.0, window.1)).abs() < 1e-9);
    assert!(wrapped.anomalies(ID).wraps >= 3);
}

#[test]
fn a_reset_is_counted_and_never_billed() {
    let mut t = counter(None);
    for i in 0..10u64 {
        put(&mut t, i * 10 * MS, 1000.0 + i as f64);
    }
    for i in 10..20u64 {
        put(&mut t, i * 10 * MS, i as f64 - 10.0);
    }
    let e = t.energy(ID, span(50 * MS, 150 * MS)).unwrap();
    assert_eq!(t.anomalies(ID).resets, 1);
    assert!(e.value().get() > 7.0 && e.value().get() <= 9.01, "{e:?}");
    assert!(e.coverage() < 1.0);
}

#[test]
fn a_leap_no_hardware_can_make_is_not_billed() {
    let mut t = counter(Some(262_143.0));
    for (i, raw) in [10.0, 11.0, 12.0, 5.0, 6.0, 7.0].into_iter().enumerate() {
        put(&mut t, i as u64 * 10 * MS, raw);
    }
    assert_eq!(t.anomalies(ID), Anomalies { resets: 1, ..Anomalies::default() });
    assert!(joules(&t, 0, 60 * MS) < 5.0);
}

#[test]
fn a_large_step_between_two_close_polls_is_no_reset() {
    let mut t = counter(None);
    // 1.2 kW refreshed every 100 ms, seen by polls 1 ms apart.
    for (i, raw) in [0.0, 120.0, 120.0, 240.0, 240.0, 360.0].into_iter().enumerate() {
        put(&mut t, (i as u64 / 2 * 100 + i as u64 % 2) * MS + 1, raw);
    }
    assert_eq!(t.anomalies(ID).resets, 0);
    assert!((joules(&t, 0, 300 * MS) - 240.0).abs() < 1e-9);
}

#[test]
fn a_failed_read_is_a_gap_the_counter_bridges() {
    let mut t = counter(None);
    for i in 0..100u64 {
        put(&mut t, i * 10 * MS, (!(40..60).contains(&i)).then_some(i as f64));
    }
    assert_eq!(t.anomalies(ID).failed, 20);
    assert!((joules(&t, 100 * MS, 900 * MS) - 80.0).abs() < 1e-9);
    let inside = t.energy(ID, span(450 * MS, 500 * MS)).unwrap();
    assert!(inside.bound().get() > 1.0, "the place of joules inside a gap is unknown: {inside:?}");
}

#[test]
fn a_dead_gauge_loses_coverage_and_invents_nothing() {
    let mut t = gauge();
    for i in 0..10u64 {
        put(&mut t, i * 100 * MS, 50.0);
    }
    for i in 10..100u64 {
        put(&mut t, i * 100 * MS, None);
    }
    let e = t.energy(ID, span(0, 10_000 * MS)).unwrap();
    assert!((e.value().get() - 50.0).abs() < 1e-9);
    assert!((e.coverage() - 0.1).abs() < 1e-9);
    assert_eq!(e.method(), Method::Integral);
}

#[test]
fn of_two_sensors_one_that_dies_takes_half_the_coverage_with_it() {
    let one = table(Quantity::Energy, Kind::Counter { wrap: None });
    let mut t = Timeline::new(&[one[0].clone(), one[0].clone()]);
    let both = [SensorId(0), SensorId(1)];
    for i in 0..800u64 {
        for (sensor, stuck) in [(0, 800), (1, 100)] {
            let value = Some(i.min(stuck) as f64);
            t.push(&Reading { sensor: SensorId(sensor), at: Stamp::from_nanos(i * 10 * MS), value });
        }
    }
    let alive = t.energy_of(&both, span(200 * MS, 800 * MS)).unwrap();
    assert_eq!((alive.value().get().round(), alive.coverage()), (120.0, 1.0));
    let dead = t.energy_of(&both, span(2_000 * MS, 3_000 * MS)).unwrap();
    assert_eq!((dead.value().get().round(), dead.coverage()), (100.0, 0.5));
    assert_eq!((t.anomalies(SensorId(0)).stalls, t.anomalies(SensorId(1)).stalls), (0, 1));
}

#[test]
fn a_reset_near_the_end_of_the_range_is_not_a_wrap() {
    let mut t = counter(Some(262_143.0));
    for i in 0..10u64 {
        put(&mut t, i * 5 * MS, 257_000.0 + i as f64);
    }
    for i in 10..20u64 {
        put(&mut t, i * 5 * MS, i as f64);
    }
    assert_eq!((t.anomalies(ID).wraps, t.anomalies(ID).resets), (0, 1));
}

#[test]
fn constant_power_held_to_the_edges_is_exact() {
    let mut t = gauge();
    put(&mut t, 0, 100.0);
    put(&mut t, 900 * MS, 100.0);
    assert!((joules(&t, 100 * MS, 1_100 * MS) - 100.0).abs() < 1e-9);
}

#[test]
fn nonsense_is_counted_and_ignored() {
    let mut t = counter(None);
    for (i, raw) in [1.0, f64::NAN, 2.0, -5.0, 3.0, f64::INFINITY, 4.0].into_iter().enumerate() {
        put(&mut t, i as u64 * 10 * MS, raw);
    }
    put(&mut t, 5 * MS, 9.0);
    assert_eq!(t.anomalies(ID), Anomalies { nonsense: 3, out_of_order: 1, ..Anomalies::default() });
    assert!(joules(&t, 0, 100 * MS) <= 3.0);
}

#[test]
fn nothing_known_is_none_not_zero() {
    let t = counter(None);
    assert_eq!(t.energy(ID, span(0, 10)), None);
    assert_eq!(t.energy(SensorId(7), span(0, 10)), None);
    let full = staircase(None);
    assert_eq!(full.energy(ID, span(9_000 * MS, 9_500 * MS)), None);
}

#[test]
fn level_knows_mean_median_and_extremes() {
    let mut t = gauge();
    for (i, w) in [10.0, 20.0, 60.0, 20.0].into_iter().enumerate() {
        put(&mut t, i as u64 * 100 * MS, w);
    }
    let level = t.level(ID, span(0, 300 * MS)).unwrap();
    assert_eq!((level.min, level.max, level.median), (10.0, 60.0, 20.0));
    assert!((level.mean - 30.0).abs() < 1e-9);
}

proptest! {
    #[test]
    fn windows_are_additive_and_never_negative(
        steps in prop::collection::vec((1u64..50, 0.0f64..2.0, 0u8..20), 3..200),
        cuts in prop::array::uniform3(0u64..4000),
        marks in prop::collection::vec(0u64..4000, 0..30),
        is_counter in any::<bool>(),
    ) {
        let mut t = played(&steps, 0, is_counter);
        marks.iter().for_each(|m| t.mark(Stamp::from_nanos(m * MS)));
        let mut cuts = cuts.map(|c| c * MS);
        cuts.sort_unstable();
        let [a, b, c] = cuts;
        let part = |x, y| t.energy(ID, span(x, y)).map_or(0.0, |e| e.value().get());
        prop_assert!(part(a, b) >= 0.0 && part(b, c) >= 0.0);
        prop_assert!((part(a, b) + part(b, c) - part(a, c)).abs() <= 1e-9 * part(a, c).max(1.0));
    }

    #[test]
    fn forgetting_the_past_changes_no_later_window(
        steps in prop::collection::vec((1u64..50, 0.0f64..2.0, 0u8..20), 3..100),
        from in 0u64..2000, length in 1u64..1000,
        marks in prop::collection::vec(0u64..4000, 0..30),
        is_counter in any::<bool>(),
    ) {
        let mut t = played(&steps, 0, is_counter);
        marks.iter().for_each(|m| t.mark(Stamp::from_nanos(m * MS)));
        let window = span(from * MS, (from + length) * MS);
        let before = t.energy(ID, window);
        t.forget_before(window.start());
        prop_assert_eq!(before, t.energy(ID, window));
    }

    /// Stamps are monotonic, so a step of the wall clock is not in them; nor does it matter where their zero is.
    #[test]
    fn the_zero_of_the_clock_changes_nothing(
        steps in prop::collection::vec((1u64..50, 0.0f64..2.0, 0u8..20), 3..100),
        from in 0u64..2000, length in 1u64..1000,
        zero in 0u64..1 << 40,
        is_counter in any::<bool>(),
    ) {
        let seen = |zero| {
            let window = span(zero + from * MS, zero + (from + length) * MS);
            played(&steps, zero, is_counter).energy(ID, window)
        };
        prop_assert_eq!(seen(0), seen(zero));
        prop_assert!(seen(0).is_none_or(|e| e.value().get() >= 0.0 && (0.0..1e9).contains(&e.bound().get())));
    }
}

/// Steps of milliseconds and joules (or hundreds of watts); of twenty, one is a failed read and one a reset.
fn played(steps: &[(u64, f64, u8)], zero: u64, is_counter: bool) -> Timeline {
    let mut t = if is_counter { counter(None) } else { gauge() };
    let (mut at, mut raw) = (zero, 100.0);
    for (dt, value, luck) in steps {
        at += dt * MS;
        raw = if *luck == 1 { 0.0 } else { raw + value };
        put(&mut t, at, (*luck != 0).then_some(if is_counter { raw } else { value * 100.0 }));
    }
    t
}
