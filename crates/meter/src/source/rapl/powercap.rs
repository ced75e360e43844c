//! RAPL through Linux powercap, the way that is tried first: what it shows is the hardware's own counter, and its wrap.

use super::super::Unavailable;
use super::{Counter, Found, Way, dram};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use wattle_core::sensor::Device;

/// Every zone below `root`, or what keeps one of them from being read.
pub(super) fn open(root: &Path) -> Result<Way, Unavailable> {
    let zones = zones(root).map_err(|refused| unreadable(&[refused]))?;
    if zones.is_empty() {
        return Err(Unavailable::new(
            format!("no RAPL package in {}", root.display()),
            "on a physical machine `sudo modprobe intel_rapl_msr` (AMD too); virtual ones rarely have it",
        ));
    }
    let folders: Vec<String> = zones.iter().map(|z| z.folder.display().to_string()).collect();
    let (mut found, mut refused) = (Vec::new(), Vec::new());
    for zone in zones {
        match zone.open() {
            Ok((counter, wrap)) => {
                found.push(Found {
                    counter: Counter::Powercap(counter),
                    device: zone.device,
                    wrap: Some(wrap),
                });
            }
            Err(e) => refused.push(e),
        }
    }
    // What is left of the machine when a part cannot be read is not its energy.
    if !refused.is_empty() {
        return Err(unreadable(&refused));
    }
    Ok(Way { name: "powercap", path: folders.join(" "), found })
}

/// What a counter shows, in joules.
pub(super) fn joules(counter: &File) -> Option<f64> {
    microjoules(counter).ok().map(|uj| uj as f64 / 1e6)
}

/// A powercap zone that is read.
struct Zone {
    folder: PathBuf,
    device: Device,
}

/// A file that could not be used.
type Refused = (PathBuf, io::Error);

impl Zone {
    fn open(&self) -> Result<(File, f64), Refused> {
        let at = |file: &str| {
            let path = self.folder.join(file);
            let opened = File::open(&path).and_then(|f| Ok((microjoules(&f)?, f)));
            opened.map_err(|e| (path, e))
        };
        let (_, counter) = at("energy_uj")?;
        let (range, _) = at("max_energy_range_uj")?;
        if range == 0 {
            return Err((self.folder.join("max_energy_range_uj"), io::ErrorKind::InvalidData.into()));
        }
        Ok((counter, range as f64 / 1e6))
    }
}

/// Every package, each followed by its memory, in the order of the sockets.
fn zones(root: &Path) -> Result<Vec<Zone>, Refused> {
    let mut zones = Vec::new();
    for (number, folder) in children(root, "intel-rapl:") {
        let package = name_of(&folder)?;
        // `package-0`, or `package-0-die-1` where a socket has several.
        if !package.starts_with("package-") {
            continue;
        }
        zones.push(Zone { folder: folder.clone(), device: super::package(&package) });
        for (_, folder) in children(&folder, &format!("intel-rapl:{number}:")) {
            if name_of(&folder)? == "dram" {
                zones.push(Zone { folder, device: dram(&package) });
            }
        }
    }
    Ok(zones)
}

/// The folders in `parent` called `prefix` and a number, by number. None if there is no `parent`.
fn children(parent: &Path, prefix: &str) -> Vec<(u32, PathBuf)> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let numbered = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((number, entry.path()))
    };
    let mut children: Vec<(u32, PathBuf)> = entries.filter_map(numbered).collect();
    children.sort_unstable();
    children
}

fn name_of(zone: &Path) -> Result<String, Refused> {
    let path = zone.join("name");
    let name = std::fs::read_to_string(&path).map_err(|e| (path, e))?;
    Ok(name.trim().to_owned())
}

/// The number in a file of powercap. Allocates nothing, also when it fails.
fn microjoules(file: &File) -> io::Result<u64> {
    let mut buffer = [0u8; 32];
    let n = file.read_at(&mut buffer, 0)?;
    let text = std::str::from_utf8(&buffer[..n]).map(str::trim_end);
    text.ok().and_then(|t| t.parse().ok()).ok_or(io::ErrorKind::InvalidData.into())
}

fn unreadable(refused: &[Refused]) -> Unavailable {
    let path = |(path, _): &Refused| path.display().to_string();
    let denied = refused.iter().filter(|(_, e)| e.kind() == io::ErrorKind::PermissionDenied);
    let denied: Vec<String> = denied.map(path).collect();
    // For root alone since Linux 5.10: power tells what a CPU computes (CVE-2020-8694).
    let chmod = format!("run `sudo chmod a+r {}` (again after each boot)", denied.join(" "));
    if denied.len() == refused.len() {
        return Unavailable::new(format!("{} RAPL counters are for root alone", denied.len()), chmod);
    }
    let list: Vec<String> = refused.iter().map(|r| format!("{}: {}", path(r), r.1)).collect();
    let fix = if denied.is_empty() {
        // Docker, containerd and Podman hide powercap since 2023 (moby GHSA-jq35-85cj-fj4p).
        "in a container, start it so that it sees powercap (Docker: --security-opt systempaths=unconfined); \
         else reload the driver: `sudo modprobe -r intel_rapl_msr; sudo modprobe intel_rapl_msr`"
            .into()
    } else {
        chmod
    };
    Unavailable::new(format!("cannot read {}", list.join(", ")), fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_for_root_alone_are_told_with_the_command_that_opens_them() {
        let refuse = |path: &str, kind: io::ErrorKind| (PathBuf::from(path), kind.into());
        let refused = [
            refuse("/sys/class/powercap/intel-rapl:0/energy_uj", io::ErrorKind::PermissionDenied),
            refuse("/sys/class/powercap/intel-rapl:1/energy_uj", io::ErrorKind::PermissionDenied),
        ];
        let told = unreadable(&refused);
        assert_eq!(
            told.fix,
            "run `sudo chmod a+r /sys/class/powercap/intel-rapl:0/energy_uj \
             /sys/class/powercap/intel-rapl:1/energy_uj` (again after each boot)"
        );
        assert_eq!(told.why, "2 RAPL counters are for root alone");
    }
}
