//! The joules of a closure: `cargo run --release --example joules`.
#![allow(clippy::print_stdout)] // An example shows something.

fn main() -> Result<(), wattle::JouleError> {
    let mut meter = wattle::Joulemeter::open()?;
    let (primes, energy) = meter.measure(|| (2..20_000u32).filter(|n| (2..*n).all(|d| n % d != 0)).count());
    println!("{primes} primes: {}", energy.map_or_else(|| "unknown".into(), |e| e.to_string()));
    Ok(())
}
