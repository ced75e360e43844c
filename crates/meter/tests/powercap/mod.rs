//! A made-up powercap tree, laid out as Linux does: zones below `devices`, and a flat folder of links to all of them.
#![allow(dead_code)] // Each test file uses its part.

use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

/// Joules at which the made-up counters start again; that of a real Xeon.
pub(crate) const RANGE: f64 = 262_143.328850;

/// A root folder with a tree in it.
pub(crate) struct Tree {
    root: tempfile::TempDir,
}

impl Tree {
    /// No zone at all.
    pub(crate) fn empty() -> Tree {
        Tree { root: tempfile::tempdir().unwrap() }
    }

    /// Two sockets with everything that Intel machines show, also what must not be read.
    pub(crate) fn two_sockets() -> Tree {
        let tree = Tree::empty();
        for (zone, name) in [
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0/intel-rapl:0:0", "core"),
            ("intel-rapl:0/intel-rapl:0:1", "uncore"),
            ("intel-rapl:0/intel-rapl:0:2", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:1/intel-rapl:1:0", "dram"),
            ("intel-rapl:2", "psys"),
        ] {
            tree.zone("intel-rapl", zone, name);
        }
        tree.zone("intel-rapl-mmio", "intel-rapl-mmio:0", "package-0");
        tree
    }

    /// What sources are to take for `/`.
    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    /// A file of a zone of the tree.
    pub(crate) fn file(&self, zone: &str, file: &str) -> PathBuf {
        self.root().join("sys/devices/virtual/powercap/intel-rapl").join(zone).join(file)
    }

    /// Sets a counter in place: a file cut off and written anew can be seen empty by a reader.
    pub(crate) fn set(&self, zone: &str, joules: f64) {
        let file = std::fs::File::options().write(true).open(self.file(zone, "energy_uj")).unwrap();
        let text = format!("{:<24.0}\n", joules * 1e6);
        file.write_all_at(text.as_bytes(), 0).unwrap();
    }

    /// Adds a `power` PMU for CPU 0, whose events are perf's software clock: a joule a second, by the real system call.
    pub(crate) fn pmu(&self, events: &[&str]) {
        self.write("sys/bus/event_source/devices/power/type", "1\n"); // PERF_TYPE_SOFTWARE
        self.write("sys/bus/event_source/devices/power/cpumask", "0\n");
        for event in events {
            let path = format!("sys/bus/event_source/devices/power/events/{event}");
            self.write(&path, "event=0x00\n"); // PERF_COUNT_SW_CPU_CLOCK, in nanoseconds
            self.write(&format!("{path}.scale"), "1e-9\n");
            self.write(&format!("{path}.unit"), "Joules\n");
        }
        self.write("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n");
    }

    /// Any other file.
    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Adds a zone to a control type, `intel-rapl` or `intel-rapl-mmio`.
    pub(crate) fn zone(&self, control: &str, zone: &str, name: &str) {
        let powercap = self.root().join("sys/devices/virtual/powercap").join(control);
        let folder = powercap.join(zone);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("name"), format!("{name}\n")).unwrap();
        std::fs::write(folder.join("max_energy_range_uj"), format!("{:.0}\n", RANGE * 1e6)).unwrap();
        std::fs::write(folder.join("energy_uj"), format!("{:<24}\n", 1_000_000)).unwrap();
        let class = self.root().join("sys/class/powercap");
        std::fs::create_dir_all(&class).unwrap();
        symlink(&folder, class.join(folder.file_name().unwrap())).unwrap();
    }
}
