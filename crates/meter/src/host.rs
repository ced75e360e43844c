//! What machine this is, for `run.json` and the name of the run folder.

use std::path::Path;
use wattle_core::summary::Host;

/// Reads the machine's description below `root`; what cannot be read is empty or 0.
pub fn host(root: &Path) -> Host {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let value = |text: &str, key: &str| {
        let line = text.lines().find_map(|l| l.trim_start().strip_prefix(key)).unwrap_or_default();
        line.trim_start_matches([' ', '\t', ':', '=']).trim().trim_matches('"').to_owned()
    };
    let release = read("etc/os-release");
    let uname = rustix::system::uname();
    let cpuinfo = read("proc/cpuinfo");
    let memory: u64 =
        value(&read("proc/meminfo"), "MemTotal:").trim_end_matches("kB").trim().parse().unwrap_or(0);
    let or_system = |text: String, name: &std::ffi::CStr| {
        if text.is_empty() { name.to_string_lossy().into_owned() } else { text }
    };
    // ARM kernels do not name the CPU; the machine's architecture is better than nothing.
    let brand = [value(&cpuinfo, "model name"), value(&cpuinfo, "Model")].into_iter().find(|b| !b.is_empty());
    Host {
        os_name: or_system(value(&release, "NAME="), uname.sysname()),
        os_version: value(&release, "VERSION_ID="),
        kernel_version: uname.release().to_string_lossy().into_owned(),
        host_name: uname.nodename().to_string_lossy().into_owned(),
        cpu_brand: brand.unwrap_or_else(|| uname.machine().to_string_lossy().into_owned()),
        cpu_count: std::thread::available_parallelism().map_or(1, |n| n.get() as u64),
        memory_bytes: memory * 1024,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described_from_its_files() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc")).unwrap();
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("proc/cpuinfo"), "processor\t: 0\nmodel name\t: Made-Up CPU 9000\n")
            .unwrap();
        std::fs::write(root.path().join("proc/meminfo"), "MemTotal:       2048 kB\n").unwrap();
        std::fs::write(root.path().join("etc/os-release"), "NAME=\"Test OS\"\nVERSION_ID=\"12\"\n").unwrap();
        let host = host(root.path());
        assert_eq!((host.cpu_brand.as_str(), host.memory_bytes), ("Made-Up CPU 9000", 2 << 20));
        assert_eq!((host.os_name.as_str(), host.os_version.as_str()), ("Test OS", "12"));
        assert!(!host.kernel_version.is_empty() && host.cpu_count > 0);
    }
}
