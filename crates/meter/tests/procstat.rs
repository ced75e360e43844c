//! CPU time and memory as read in a run: on made-up machines, and of real processes.
#![allow(clippy::unwrap_used)] // A test may, also in what its tests share.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use wattle_core::registry::Params;
use wattle_core::sensor::{DeviceKind, Kind, Quantity, Sensor};
use wattle_meter::clock;
use wattle_meter::source::{self, Depth, Source, Wanted};

/// Linux counts CPU time in hundredths of a second on every machine these tests run on.
const HZ: f64 = 100.0;

/// A root folder with a procfs in it.
struct Proc {
    root: tempfile::TempDir,
}

impl Proc {
    fn new(stat: &str) -> Proc {
        let proc = Proc { root: tempfile::tempdir().unwrap() };
        proc.write("stat", stat);
        proc.write("meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n");
        proc
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.root.path().join("proc").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A process: own ticks, ticks of children waited for, pages. Its start is its id, unless it is a later one.
    fn process(&self, pid: u32, parent: u32, state: char, numbers: [u64; 3]) {
        self.process_from(pid, parent, state, numbers, pid);
    }

    fn process_from(&self, pid: u32, parent: u32, state: char, [own, waited, pages]: [u64; 3], start: u32) {
        let text = format!(
            "{pid} (a ) b) {state} {parent} 1 1 0 -1 4194560 9 9 0 0 {own} 0 {waited} 0 20 0 1 0 {start} 9999 {pages} 18\n"
        );
        self.write(&format!("{pid}/stat"), &text);
    }

    fn end(&self, pid: u32) {
        std::fs::remove_dir_all(self.root.path().join(format!("proc/{pid}"))).unwrap();
    }

    fn open(&self, params: &[(&str, &str)]) -> Result<Box<dyn Source>, String> {
        open(Some(self.root.path()), params)
    }
}

fn open(root: Option<&Path>, params: &[(&str, &str)]) -> Result<Box<dyn Source>, String> {
    let params: Params = params.iter().map(|(k, v)| (format!("procstat.{k}"), (*v).to_owned())).collect();
    let root = root.map(Path::to_owned);
    let opened = source::open(&Wanted { names: vec!["procstat".into()], params, root, ..Wanted::default() });
    Ok(opened.map_err(|e| e.to_string())?.sources.remove(0))
}

fn read(source: &mut dyn Source) -> Vec<(String, Option<f64>)> {
    let mut values = Vec::new();
    source.read(Depth::All, &mut |i, value| values.push((i, value)));
    values.into_iter().map(|(i, value)| (source.sensors()[i].name.clone(), value)).collect()
}

fn value(source: &mut dyn Source, name: &str) -> Option<f64> {
    let all = read(source);
    all.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name} in {all:?}")).1
}

fn tree(source: &mut dyn Source) -> (Option<f64>, Option<f64>) {
    (value(source, "procstat/tree/cpu_busy"), value(source, "procstat/tree/memory_used"))
}

const TWO: &str = "cpu  100 20 30 4000 500 6 7 800 90 0\n\
                   cpu0 60 10 20 2000 300 5 4 500 50 0\n\
                   cpu1 40 10 10 2000 200 1 3 300 40 0\nintr 5\n";

#[test]
fn busy_time_leaves_out_idle_iowait_and_steal_and_every_state_is_there_by_itself() {
    let mut source = Proc::new(TWO).open(&[]).unwrap();
    let expected = [
        ("procstat/cpu_busy", 163.0 / HZ),
        ("procstat/cpu/user", 100.0 / HZ),
        ("procstat/cpu/nice", 20.0 / HZ),
        ("procstat/cpu/system", 30.0 / HZ),
        ("procstat/cpu/idle", 4000.0 / HZ),
        ("procstat/cpu/iowait", 500.0 / HZ),
        ("procstat/cpu/irq", 6.0 / HZ),
        ("procstat/cpu/softirq", 7.0 / HZ),
        ("procstat/cpu/steal", 800.0 / HZ),
        ("procstat/memory_used", 60.0 * 1024.0),
        ("procstat/memory_total", 100.0 * 1024.0),
        ("procstat/cpu0/busy", 99.0 / HZ),
        ("procstat/cpu1/busy", 64.0 / HZ),
    ];
    let expected: Vec<_> = expected.map(|(name, value)| (name.to_owned(), Some(value))).into();
    assert_eq!(read(source.as_mut()), expected);
}

#[test]
fn a_cpu_is_a_device_of_its_own_and_the_machine_another() {
    let source = Proc::new(TWO).open(&[]).unwrap();
    let find = |name: &str| -> &Sensor { source.sensors().iter().find(|s| s.name == name).unwrap() };
    let core = find("procstat/cpu1/busy");
    assert_eq!((core.device.kind, core.device.id.as_str()), (DeviceKind::Cpu, "cpu1"));
    assert_eq!((core.quantity, core.kind), (Quantity::CpuBusy, Kind::Counter { wrap: None }));
    assert_eq!(find("procstat/cpu/steal").device.kind, DeviceKind::Machine);
    let machine = |s: &&Sensor| (s.device.kind, s.quantity) == (DeviceKind::Machine, Quantity::CpuBusy);
    assert_eq!(source.sensors().iter().filter(machine).count(), 1);
}

#[test]
fn the_user_says_how_much_of_each_cpu_is_read() {
    let proc = Proc::new(TWO);
    let of_cores = |cores: &str| {
        let source = proc.open(&[("cores", cores)]).unwrap();
        source.sensors().iter().filter(|s| s.device.kind == DeviceKind::Cpu).count()
    };
    assert_eq!([of_cores("none"), of_cores("busy"), of_cores("all")], [0, 2, 18]);
    let mut all = proc.open(&[("cores", "all")]).unwrap();
    assert_eq!(value(all.as_mut(), "procstat/cpu1/steal"), Some(300.0 / HZ));
    assert_eq!(value(all.as_mut(), "procstat/cpu0/user"), Some(60.0 / HZ));
    let refusal = proc.open(&[("cores", "some")]).err().unwrap();
    assert!(refusal.contains("\"some\"") && refusal.contains("busy, all or none"), "{refusal}");
}

#[test]
fn an_old_kernel_has_fewer_states() {
    let mut source = Proc::new("cpu  100 20 30 4000\ncpu0 100 20 30 4000\nintr 5\n").open(&[]).unwrap();
    assert_eq!(source.sensors().iter().filter(|s| s.name.starts_with("procstat/cpu/")).count(), 4);
    assert_eq!(value(source.as_mut(), "procstat/cpu_busy"), Some(150.0 / HZ));
    assert_eq!(value(source.as_mut(), "procstat/cpu0/busy"), Some(150.0 / HZ));
}

#[test]
fn a_cpu_that_goes_offline_is_a_gap_and_the_others_keep_their_numbers() {
    let line = |n: u32| format!("cpu{n} {n} 0 0 0 0 0 0 0 0 0\n");
    let stat = |cpus: &[u32]| {
        let lines: String = cpus.iter().map(|n| line(*n)).collect();
        format!("cpu  9 0 0 0 0 0 0 0 0 0\n{lines}intr 5\n")
    };
    let proc = Proc::new(&stat(&[0, 1, 2, 3]));
    let mut source = proc.open(&[]).unwrap();
    proc.write("stat", &stat(&[0, 2, 3, 7]));
    let busy = read(source.as_mut()).split_off(11);
    let expected = [(0, Some(0.0)), (1, None), (2, Some(0.02)), (3, Some(0.03))];
    assert_eq!(busy, expected.map(|(n, v)| (format!("procstat/cpu{n}/busy"), v)));
    proc.write("stat", &stat(&[0, 1, 2, 3]));
    assert_eq!(value(source.as_mut(), "procstat/cpu1/busy"), Some(0.01), "and back again");
}

#[test]
fn five_hundred_and_twelve_cpus_are_read_to_the_last() {
    let long = u64::MAX / 10;
    let lines: String = (0..512).map(|n| format!("cpu{n} {n} 0 0 {long} {long} 0 0 {long} 0 0\n")).collect();
    let interrupts = "0 ".repeat(50_000);
    let stat = format!("cpu  1 2 3 {long} {long} 6 7 {long} 0 0\n{lines}intr 5 {interrupts}\n");
    let mut source = Proc::new(&stat).open(&[]).unwrap();
    assert_eq!(value(source.as_mut(), "procstat/cpu511/busy"), Some(5.11));
    assert_eq!(read(source.as_mut()).iter().filter(|(_, v)| v.is_none()).count(), 0);
}

#[test]
fn garbage_is_refused_when_opened_and_a_gap_later() {
    assert!(Proc::new("nonsense").open(&[]).is_err());
    assert!(Proc::new("cpu  1 2 3\ncpu0 1 2 3\n").open(&[]).is_err());
    assert!(open(Some(tempfile::tempdir().unwrap().path()), &[]).err().unwrap().contains("procfs only"));
    let proc = Proc::new(TWO);
    let mut source = proc.open(&[]).unwrap();
    proc.write("meminfo", "MemTotal: many kB\n");
    for garbage in ["cpu  x\n", "", "cpu  1 2 3 4", "cpu  1 2 3 4\ncpu0 1 2 3 4\n", "\u{0}\n"] {
        proc.write("stat", garbage);
        assert!(read(source.as_mut()).iter().all(|(_, v)| v.is_none()), "{garbage:?}");
    }
}

#[test]
fn a_tree_is_a_process_with_all_below_it_and_nobody_else() {
    let proc = Proc::new(TWO);
    proc.process(1, 0, 'S', [1000, 1000, 1000]);
    proc.process(50, 1, 'S', [10, 5, 2]);
    // Its child has a lower id than its parent: ids start again from below.
    proc.process(60, 50, 'R', [20, 0, 3]);
    proc.process(7, 60, 'R', [40, 0, 4]);
    proc.process(51, 1, 'R', [1000, 1000, 1000]);
    let mut source = proc.open(&[("pid", "50")]).unwrap();
    let page = rustix::param::page_size() as f64;
    assert_eq!(tree(source.as_mut()), (Some(0.75), Some(9.0 * page)));
    let device = &source.sensors().iter().find(|s| s.name == "procstat/tree/cpu_busy").unwrap().device;
    assert_eq!((device.kind, device.id.as_str()), (DeviceKind::Process, "50"));
    proc.process(8, 7, 'R', [100, 0, 1]);
    assert_eq!(tree(source.as_mut()), (Some(1.75), Some(10.0 * page)), "a new one is found");
}

#[test]
fn cpu_time_of_a_tree_never_falls_while_it_lives() {
    let proc = Proc::new(TWO);
    proc.process(50, 1, 'S', [10, 0, 2]);
    proc.process(60, 50, 'S', [20, 0, 3]);
    proc.process(61, 50, 'S', [30, 0, 3]);
    let mut source = proc.open(&[("pid", "50")]).unwrap();
    let mut busy = || value(source.as_mut(), "procstat/tree/cpu_busy");
    assert_eq!(busy(), Some(0.60));
    // One ends and is waited for.
    proc.end(60);
    proc.process(50, 1, 'S', [10, 20, 2]);
    assert_eq!(busy(), Some(0.60));
    // The other ends and nobody waits; the first goes on.
    proc.end(61);
    assert_eq!(busy(), Some(0.60));
    assert_eq!(busy(), Some(0.60));
    proc.process(50, 1, 'S', [15, 20, 2]);
    assert_eq!(busy(), Some(0.65));
}

#[test]
fn what_a_tree_left_behind_is_still_of_it_and_when_all_has_ended_there_is_nothing() {
    let proc = Proc::new(TWO);
    proc.process(50, 1, 'S', [10, 0, 2]);
    proc.process(60, 50, 'S', [20, 0, 3]);
    let mut source = proc.open(&[("pid", "50")]).unwrap();
    proc.end(50);
    proc.process_from(60, 1, 'S', [25, 0, 3], 60);
    let page = rustix::param::page_size() as f64;
    assert_eq!(tree(source.as_mut()).1, Some(3.0 * page), "init has taken it over");
    proc.process(60, 1, 'Z', [25, 0, 0]);
    assert_eq!(tree(source.as_mut()), (None, None), "not waited for, and ended all the same");
    proc.end(60);
    assert_eq!(tree(source.as_mut()), (None, None));
    // The id is used again, by somebody else.
    proc.process_from(50, 1, 'R', [9000, 0, 9000], 9999);
    assert_eq!(tree(source.as_mut()), (None, None));
    assert!(value(source.as_mut(), "procstat/cpu_busy").is_some(), "the machine goes on");
}

#[test]
fn a_process_that_cannot_be_read_is_a_gap_and_not_gone() {
    let proc = Proc::new(TWO);
    proc.process(50, 1, 'S', [10, 0, 2]);
    let mut source = proc.open(&[("pid", "50")]).unwrap();
    proc.write("50/stat", "50 (sh) S gar bage");
    assert_eq!(tree(source.as_mut()), (None, None));
    proc.process(50, 1, 'S', [11, 0, 2]);
    assert_eq!(tree(source.as_mut()).0, Some(0.11));
}

#[test]
fn a_tree_that_is_not_there_is_refused_with_the_way_out() {
    let proc = Proc::new(TWO);
    proc.process(50, 1, 'Z', [10, 0, 0]);
    for (pid, why) in [
        ("49", "there is no process 49"),
        ("50", "there is no process 50"),
        ("-1", "procstat.pid is \"-1\""),
        ("me", "procstat.pid is \"me\""),
        ("self", "this process is not below"),
    ] {
        let refusal = proc.open(&[("pid", pid)]).err().unwrap();
        assert!(refusal.contains(why) && refusal.contains("give the id of a process"), "{pid}: {refusal}");
    }
}

/// A shell in a group of its own, which ends with it.
struct Shell(Child);

impl Shell {
    fn start(script: &str) -> Shell {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        Shell(command.spawn().unwrap())
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let group = format!("-{}", self.0.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = self.0.wait();
    }
}

fn wait_for(source: &mut dyn Source, enough: impl Fn((Option<f64>, Option<f64>)) -> bool) {
    let start = clock::now();
    let mut highest = 0.0;
    loop {
        let seen = tree(source);
        if let Some(busy) = seen.0 {
            assert!(busy >= highest, "{busy} after {highest}");
            highest = busy;
        }
        if enough(seen) {
            return;
        }
        assert!(clock::now().since(start).get() < 60.0, "{seen:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_real_tree_is_followed_to_its_grandchildren_and_to_its_end() {
    // The grandchild works for a while and ends; then its time is in what its parents waited for.
    let work = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
    let mut shell = Shell::start(&format!("sh -c 'sh -c \"{}\"; sleep 60'", work.replace('$', "\\$")));
    let pid = shell.0.id().to_string();
    let mut source = open(None, &[("pid", &pid)]).unwrap();
    wait_for(source.as_mut(), |(busy, memory)| busy > Some(0.05) && memory > Some(100_000.0));
    Command::new("kill").args(["-KILL", "--", &format!("-{pid}")]).status().unwrap();
    shell.0.wait().unwrap();
    wait_for(source.as_mut(), |seen| seen == (None, None));
}

#[test]
fn self_is_what_this_process_started_and_not_this_process() {
    let mut source = open(None, &[("pid", "self")]).unwrap();
    let _shell = Shell::start("while :; do :; done");
    wait_for(source.as_mut(), |(busy, memory)| busy > Some(0.05) && memory > Some(100_000.0));
    let device = &source.sensors().iter().find(|s| s.quantity == Quantity::MemoryTotal);
    assert!(device.is_some(), "and the machine is there too");
}
