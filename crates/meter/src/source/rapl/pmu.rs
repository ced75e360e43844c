//! RAPL through perf events: the kernel's `power` PMU, for machines that show no powercap, as in many containers.
//!
//! The kernel follows the wraps of the hardware's counters and counts in 64 bits from when an event is opened.

use super::super::Settings;
use super::{Counter, Found, Way, dram, package, perf};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// What is read of each package: the event's name. `cores` and `gpu` lie inside, `psys` around.
const PACKAGE: &str = "energy-pkg";
const DRAM: &str = "energy-ram";

/// An event that counts.
pub(super) struct Event {
    file: File,
    joules_per_count: f64,
}

impl Event {
    /// What was counted since it was opened.
    pub(super) fn joules(&self) -> Option<f64> {
        let mut count = [0; 8];
        let n = (&self.file).read(&mut count).ok()?;
        (n == count.len()).then(|| u64::from_ne_bytes(count) as f64 * self.joules_per_count)
    }
}

/// Why this way is closed, and what would open it where something is known to.
pub(super) struct Refused {
    pub(super) why: String,
    pub(super) fix: Option<String>,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, fix: None }
    }
}

/// Every package and its memory, or what keeps one of them from being read.
pub(super) fn open(settings: &Settings) -> Result<Way, Refused> {
    let pmu = settings.path("/sys/bus/event_source/devices/power");
    if !pmu.exists() {
        return Err(format!("no {}", pmu.display()).into());
    }
    let kind = parse::<u32>(&pmu.join("type"))?;
    let package_energy = Definition::read(&pmu, PACKAGE)?
        .ok_or_else(|| format!("{} counts no packages ({PACKAGE})", pmu.display()))?;
    let dram_energy = Definition::read(&pmu, DRAM)?;
    let mut found = Vec::new();
    for (cpu, name) in packages(settings, &pmu.join("cpumask"))? {
        let event = |definition: &Definition| {
            definition.open(kind, cpu).map(Counter::Perf).map_err(|e| refusal(definition.name, cpu, &e))
        };
        found.push(Found { counter: event(&package_energy)?, device: package(&name), wrap: None });
        if let Some(dram_energy) = &dram_energy {
            found.push(Found { counter: event(dram_energy)?, device: dram(&name), wrap: None });
        }
    }
    Ok(Way { name: "perf", path: pmu.display().to_string(), found })
}

/// An event as sysfs describes it.
struct Definition {
    name: &'static str,
    config: u64,
    joules_per_count: f64,
}

impl Definition {
    /// `None` if the PMU has no such event.
    fn read(pmu: &Path, name: &'static str) -> Result<Option<Self>, String> {
        let path = pmu.join("events").join(name);
        if !path.exists() {
            return Ok(None);
        }
        // `event=0x02`; the PMU has no other field (its `format` folder).
        let text = read(&path)?;
        let number = text.strip_prefix("event=0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        let config = number.ok_or_else(|| format!("{} says \"{text}\"", path.display()))?;
        let unit = read(&path.with_extension("unit"))?;
        if unit != "Joules" {
            return Err(format!("{name} is in {unit}, not in Joules"));
        }
        let joules_per_count = parse::<f64>(&path.with_extension("scale"))?;
        if !(joules_per_count.is_finite() && joules_per_count > 0.0) {
            return Err(format!("{name} has the scale {joules_per_count}"));
        }
        Ok(Some(Self { name, config, joules_per_count }))
    }

    fn open(&self, kind: u32, cpu: u32) -> io::Result<Event> {
        let event =
            Event { file: perf::open(kind, self.config, cpu)?, joules_per_count: self.joules_per_count };
        event.joules().map(|_| event).ok_or(io::ErrorKind::InvalidData.into())
    }
}

/// The CPU to ask for each package, and powercap's name for it: `package-0`, or `package-0-die-1` where a socket has several.
fn packages(settings: &Settings, cpumask: &Path) -> Result<Vec<(u32, String)>, String> {
    let text = read(cpumask)?;
    let cpus = numbers(&text).ok_or_else(|| format!("{} says \"{text}\"", cpumask.display()))?;
    let topology = |cpu: u32, file: &str| {
        parse::<u32>(&settings.path(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/{file}")))
    };
    let mut packages = Vec::new();
    for cpu in cpus {
        packages.push((topology(cpu, "physical_package_id")?, cpu));
    }
    packages.sort_unstable();
    let several_dies = packages.windows(2).any(|pair| pair[0].0 == pair[1].0);
    let name = |(package, cpu): (u32, u32)| {
        let die = if several_dies { format!("-die-{}", topology(cpu, "die_id")?) } else { String::new() };
        Ok((cpu, format!("package-{package}{die}")))
    };
    packages.into_iter().map(name).collect()
}

/// The numbers of a list as the kernel writes it: `0,18` or `0-3`. None if there is none.
fn numbers(list: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    (!all.is_empty()).then_some(all)
}

fn read(path: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn parse<T: std::str::FromStr>(path: &Path) -> Result<T, String> {
    let text = read(path)?;
    text.parse().map_err(|_| format!("{} says \"{text}\"", path.display()))
}

fn refusal(event: &str, cpu: u32, error: &io::Error) -> Refused {
    let why = format!("perf_event_open of {event} on CPU {cpu}: {error}");
    // EPERM and EACCES: a counter of a whole CPU is for those who may see everybody (perf_event_open(2)).
    let fix = (error.kind() == io::ErrorKind::PermissionDenied).then(|| {
        "run `sudo sysctl kernel.perf_event_paranoid=0` (until the next boot), or give wattle CAP_PERFMON \
         (Docker: --cap-add PERFMON)"
            .to_owned()
    });
    Refused { why, fix }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wattle_core::registry::Params;

    #[test]
    fn packages_have_the_names_that_powercap_gives_them() {
        let root = tempfile::tempdir().unwrap();
        let settings = Settings { params: Params::new(), root: root.path().into(), recordings: None };
        let write = |path: String, text: &str| {
            let path = settings.path(&path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        };
        for (cpu, package, die) in [(0, "1", "0"), (4, "0", "0"), (5, "0", "1"), (12, "1", "1")] {
            write(format!("/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"), package);
            write(format!("/sys/devices/system/cpu/cpu{cpu}/topology/die_id"), die);
        }
        let cpumask = settings.path("/cpumask");
        let named = |mask: &str| {
            write("/cpumask".into(), mask);
            packages(&settings, &cpumask)
        };
        let all = |pairs: &[(u32, &str)]| Ok(pairs.iter().map(|(c, n)| (*c, (*n).to_owned())).collect());
        assert_eq!(named("0,4"), all(&[(4, "package-0"), (0, "package-1")]));
        let dies =
            [(4, "package-0-die-0"), (5, "package-0-die-1"), (0, "package-1-die-0"), (12, "package-1-die-1")];
        assert_eq!(named("0,4-5,12"), all(&dies));
        assert!(named("").is_err() && named("0-").is_err() && named("all").is_err());
        assert!(named("77").unwrap_err().contains("cpu77/topology/physical_package_id"));
    }

    #[test]
    fn a_kernel_that_forbids_it_is_told_with_the_command_that_allows_it() {
        // EPERM and EACCES.
        for number in [1, 13] {
            let told = refusal(PACKAGE, 0, &io::Error::from_raw_os_error(number));
            assert!(told.why.contains("perf_event_open of energy-pkg on CPU 0"), "{}", told.why);
            assert!(told.fix.unwrap().contains("sudo sysctl kernel.perf_event_paranoid=0"));
        }
        // ENOSYS: no command changes that.
        assert!(refusal(PACKAGE, 0, &io::Error::from_raw_os_error(38)).fix.is_none());
    }
}
