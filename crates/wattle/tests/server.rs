//! A server that is started for a run: it is asked, metered, and gone afterwards with everything it started, however the run ends.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod support;

use serde_json::Value;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use support::{Bench, recorded, stderr};
use wattle_sim_server::Config;

/// The simulated server as a program: this very file, called by the scripts below.
#[test]
#[ignore = "the program that the other tests start"]
fn simulated_server() {
    let Ok(listen) = std::env::var("SIM_LISTEN") else { return };
    if let Ok(status) = std::env::var("SIM_STATUS") {
        return refuse_all(&listen, &status);
    }
    let model = std::env::var("SIM_MODEL").unwrap_or_else(|_| "tiny".into());
    let ttft_ms = std::env::var("SIM_TTFT_MS").map_or(40.0, |ms| ms.parse().unwrap());
    let config = Config { listen, model, tokens: 4, ttft_ms, keep_log: false, ..Config::default() };
    let server = wattle_sim_server::Server::start(config).unwrap();
    println!("listening at {}", server.address());
    server.wait(&AtomicBool::new(false)).unwrap();
}

/// A server that says the same to everybody.
fn refuse_all(listen: &str, status: &str) {
    use std::io::{Read, Write};
    for stream in TcpListener::bind(listen).unwrap().incoming() {
        let mut stream = stream.unwrap();
        let mut head = Vec::new();
        let mut buffer = [0; 1024];
        while !head.windows(4).any(|w| w == b"\r\n\r\n") {
            match stream.read(&mut buffer) {
                Ok(n) if n > 0 => head.extend_from_slice(&buffer[..n]),
                _ => break,
            }
        }
        let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}");
    }
}

/// A bench with scripts in it, and questions.
struct Scene {
    bench: Bench,
}

impl Scene {
    fn new() -> Self {
        let bench = Bench::new();
        let lines: String = (0..40).map(|i| format!("{{\"prompt\":\"question {i}\"}}\n")).collect();
        bench.write("q.jsonl", &lines);
        // "sh serve.sh PORT" becomes the server.
        let program = std::env::current_exe().unwrap().display().to_string();
        let exec = format!("exec '{program}' --ignored --exact simulated_server --nocapture\n");
        bench.write("serve.sh", &format!("export SIM_LISTEN=127.0.0.1:$1\n{exec}"));
        Self { bench }
    }

    fn script(&self, name: &str, text: &str) {
        self.bench.write(name, text);
    }

    /// The command line of a run with this server.
    fn command(&self, command: &str, more: &[&str]) -> Command {
        let server = format!("command={command}");
        let args = ["run", "--server", &server, "--name", "x", "--warmup", "0", "--idle-s", "0"];
        let dataset = ["--dataset", "jsonl", "--dataset-param", "path=q.jsonl"];
        self.bench.command(&[&args[..], &dataset, more].concat())
    }

    fn run(&self, command: &str, more: &[&str]) -> Output {
        self.command(command, more).output().unwrap()
    }

    fn start(&self, command: &str, more: &[&str]) -> Child {
        use std::process::Stdio;
        self.command(command, more).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn folder(&self) -> PathBuf {
        self.bench.path().join("runs/x")
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.bench.path().join(name)).ok().filter(|text| text.ends_with('\n'))
    }

    /// A process that wrote its number to a file.
    fn process(&self, name: &str) -> u32 {
        wait_for(name, || self.read(name)?.trim().parse().ok())
    }

    /// What is in the folder for runs.
    fn left(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.bench.path().join("runs")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn event(&self, name: &str) -> Option<Value> {
        let log = std::fs::read_to_string(self.folder().join("log.jsonl")).ok()?;
        let mut lines = log.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        lines.rfind(|v| v["event"] == name).map(|v| v["data"].clone())
    }
}

/// Waits for something; the limit is only there to fail rather than hang.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} did not come");
}

fn runs(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|s| s != "Z")
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

fn failed(out: &Output, parts: &[&str]) {
    let said = stderr(out);
    assert_eq!(out.status.code(), Some(1), "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
}

fn warned(summary: &Value, warning: &str) -> Option<String> {
    let all = summary["warnings"].as_array().unwrap();
    all.iter().find(|w| w["warning"] == warning).map(|w| w["text"].as_str().unwrap().to_owned())
}

fn summary(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("summary.json")).unwrap()).unwrap()
}

#[test]
fn it_is_asked_metered_and_gone_afterwards() {
    let scene = Scene::new();
    let out = scene.run("sh serve.sh {port}", &["--source", "procstat"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let summary = summary(&scene.folder());
    assert_eq!((&summary["total_queries"], &summary["model"]), (&40.into(), &"tiny".into()));
    assert_eq!(summary["config"]["client"], "openai", "the client follows from the server");
    assert_eq!(summary["config"]["url"], Value::Null, "another port will do next time");
    let started = scene.event("server_started").unwrap();
    assert!(!runs(started["pid"].as_u64().unwrap().try_into().unwrap()));
    let port = started["port"].as_u64().unwrap();
    assert_eq!(started["command"], format!("sh serve.sh {port}"));
    assert!(TcpListener::bind(("127.0.0.1", u16::try_from(port).unwrap())).is_ok());
    assert!(scene.event("server_ready").unwrap()["seconds"].as_f64().unwrap() > 0.0);
    let stopped = scene.event("server_stopped").unwrap();
    assert_eq!((&stopped["signal"], &stopped["killed"]), (&15.into(), &false.into()), "{stopped}");
    let log = std::fs::read_to_string(scene.folder().join("server.log")).unwrap();
    assert!(log.contains(&format!("listening at 127.0.0.1:{port}")), "{log}");
    let resources = &summary["resources"];
    assert!(resources["tree_peak_rss_mb"].as_f64().unwrap() > 0.5, "{resources}");
    assert!(resources["tree_cpu_s"].as_f64().is_some(), "{resources}");
    assert_eq!(warned(&summary, "server_ended"), None);
    let left: Vec<_> = std::fs::read_dir(scene.bench.path().join("runs")).unwrap().collect();
    assert_eq!(left.len(), 1, "only the run");
}

#[test]
fn what_it_started_is_gone_too_even_if_it_left_the_group_and_ignores_being_asked() {
    let scene = Scene::new();
    scene.script("stubborn.sh", "trap '' TERM\necho $$ > $1\nwhile :; do sleep 1; done\n");
    scene.script(
        "family.sh",
        "sh stubborn.sh near &\nsetsid sh stubborn.sh far &\n(setsid sh stubborn.sh orphan &)\nexec sh serve.sh $1\n",
    );
    let out = scene.run("sh family.sh {port}", &["--energy", "none"]);
    assert!(out.status.success(), "{}", stderr(&out));
    for name in ["near", "far", "orphan"] {
        assert!(!runs(scene.process(name)), "{name}");
    }
    assert_eq!(scene.event("server_stopped").unwrap()["killed"], true);
}

#[test]
fn one_that_does_not_stop_is_killed_when_its_time_is_up() {
    let scene = Scene::new();
    scene.script("deaf.sh", "trap '' TERM\nsh serve.sh $1 &\nwhile :; do sleep 0.1; done\n");
    let out = scene.run("sh deaf.sh {port}", &["--energy", "none", "--server", "stop_s=0.3"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let stopped = scene.event("server_stopped").unwrap();
    assert_eq!((&stopped["signal"], &stopped["killed"]), (&9.into(), &true.into()), "{stopped}");
}

#[test]
fn one_that_dies_at_once_is_quoted() {
    let scene = Scene::new();
    scene.script("broken.sh", "echo loading\necho 'CUDA out of memory' >&2\nexit 3\n");
    let out = scene.run("sh broken.sh {port}", &["--energy", "none"]);
    failed(&out, &["ended with exit code 3", "loading\n", "CUDA out of memory"]);
    assert!(out.stdout.is_empty());
    let [log] = &scene.left()[..] else { panic!("{:?}", scene.left()) };
    let name = log.file_name().unwrap().to_str().unwrap();
    failed(&out, &["all that it said is in ", name]);
    assert_eq!(std::fs::read_to_string(log).unwrap(), "loading\nCUDA out of memory\n");
    std::fs::remove_dir_all(scene.bench.path().join("runs")).unwrap();
    failed(&scene.run("true {port}", &["--energy", "none"]), &["exit code 0", "stay", "said nothing"]);
    assert!(!scene.bench.path().join("runs").exists(), "nothing is left behind");
}

#[test]
fn one_that_never_answers_is_given_up_on() {
    let scene = Scene::new();
    scene.script("mute.sh", "echo $$ > pid\necho still loading\nexec sleep 600\n");
    let out = scene.run("sh mute.sh {port}", &["--energy", "none", "--server", "ready_s=1"]);
    failed(&out, &["after 1 s", "still loading", "ready_s=2"]);
    assert!(!runs(scene.process("pid")));
    assert_eq!(scene.left().len(), 1, "what it said");
}

#[test]
fn one_that_listens_and_is_not_well_is_waited_for() {
    let scene = Scene::new();
    let out = scene.run(
        "sh serve.sh {port}",
        &["--energy", "none", "--server", "ready_s=1", "--server", "health=/no/such/path"],
    );
    failed(&out, &["/no/such/path says HTTP 404"]);
}

#[test]
fn one_that_answers_with_errors_is_not_ready() {
    let scene = Scene::new();
    scene.script("ill.sh", "export SIM_STATUS='500 Oops'\nexec sh serve.sh $1\n");
    let out = scene.run("sh ill.sh {port}", &["--energy", "none", "--server", "ready_s=1"]);
    failed(&out, &["after 1 s", "the list of models says HTTP 500", "health=PATH"]);
}

#[test]
fn one_that_refuses_the_key_is_not_waited_for() {
    let scene = Scene::new();
    scene.script("strict.sh", "export SIM_STATUS='401 No'\nexec sh serve.sh $1\n");
    let out = scene.run("sh strict.sh {port}", &["--energy", "none", "--server", "ready_s=86400"]);
    failed(&out, &["refuses the key (HTTP 401", "OPENAI_API_KEY"]);
}

#[test]
fn a_secret_reaches_it_and_no_file() {
    let scene = Scene::new();
    scene.script("keyed.sh", "echo \"$3\" > told\nexec sh serve.sh $1\n");
    let more = ["--energy", "none", "--max-queries", "2"];
    let mut command = scene.command("sh keyed.sh {port} --api-key {env:MY_KEY}", &more);
    let out = command.env("MY_KEY", "geheim-1234").output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(scene.read("told").unwrap(), "geheim-1234\n");
    let mut files = 0;
    for path in std::fs::read_dir(scene.folder()).unwrap().map(|entry| entry.unwrap().path()) {
        let bytes = std::fs::read(&path).unwrap_or_default();
        assert!(!bytes.windows(11).any(|w| w == b"geheim-1234"), "{path:?}");
        files += usize::from(bytes.windows(12).any(|w| w == b"{env:MY_KEY}"));
    }
    assert!(files >= 2, "run.json and the log name the variable");

    let out = Scene::new().run("sh keyed.sh {port} --api-key geheim-1234", &more);
    assert_ne!(out.status.code(), Some(0));
    assert!(stderr(&out).contains("{env:NAME}") && !stderr(&out).contains("geheim"), "{}", stderr(&out));
}

#[test]
fn somebody_elses_server_is_not_measured() {
    let scene = Scene::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("port={}", taken.local_addr().unwrap().port());
    scene.script("mark.sh", "echo started > started\nexec sleep 600\n");
    let out = scene.run("sh mark.sh", &["--energy", "none", "--server", &port]);
    failed(&out, &["somebody already listens"]);
    assert_eq!(scene.read("started"), None);
}

#[test]
fn wrong_options_are_refused_before_anything_starts() {
    let scene = Scene::new();
    let out = scene.run("sh serve.sh {port}", &["--server", "redy_s=1"]);
    assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
    assert!(stderr(&out).contains("did you mean \"ready_s\"?"), "{}", stderr(&out));
    failed(&scene.run("no-such-program {port}", &[]), &["cannot start the server", "no such program"]);
}

#[test]
fn an_interrupt_stops_it_while_it_starts_and_while_it_is_asked() {
    let scene = Scene::new();
    scene.script("mute.sh", "echo $$ > pid\nexec sleep 600\n");
    let child = scene.start("sh mute.sh {port}", &["--energy", "none"]);
    let pid = scene.process("pid");
    signal(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert!(!runs(pid));

    // Slow until it is resumed: the run cannot end before the signal.
    let script = "[ -e fast ] || export SIM_TTFT_MS=400\nexec sh serve.sh $1\n";
    scene.script("slow.sh", script);
    let child = scene.start("sh slow.sh {port}", &["--energy", "none"]);
    let pid = wait_for("a record", || {
        (recorded(&scene.folder()).len() > 2).then(|| scene.event("server_started"))?
    });
    signal(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert!(!runs(pid["pid"].as_u64().unwrap().try_into().unwrap()));
    assert_eq!(warned(&summary(&scene.folder()), "server_ended"), None);

    assert!(recorded(&scene.folder()).len() < 40);
    scene.script("fast", "");
    let run = scene.folder();
    let out = scene.bench.run(&["run", "--resume", run.to_str().unwrap()]);
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(recorded(&run).len(), 40, "it was started again");
    let log = std::fs::read_to_string(run.join("server.log")).unwrap();
    assert_eq!(log.matches("listening at").count(), 2, "{log}");
}

#[test]
fn a_second_interrupt_ends_everything_at_once() {
    let scene = Scene::new();
    scene.script("stubborn.sh", "trap '' TERM\necho $$ > far\nwhile :; do sleep 0.1; done\n");
    scene.script(
        "deaf.sh",
        "trap '' TERM\necho $$ > pid\nsetsid sh stubborn.sh &\nsh serve.sh $1 &\necho $! > child\nwhile :; do sleep 0.1; done\n",
    );
    let child = scene.start("sh deaf.sh {port}", &["--energy", "none", "--server", "stop_s=60"]);
    let pids = ["pid", "child", "far"].map(|name| scene.process(name));
    wait_for("a record", || (!recorded(&scene.folder()).is_empty()).then_some(()));
    signal(&child, "-INT");
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, "-INT");
    // As a finger on the key does.
    signal(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    // The group is killed by the system, a moment after us at the latest; who left it by nobody but us.
    assert!(!runs(pids[2]), "the one that left the group");
    for pid in pids {
        wait_for("the end of the server", || (!runs(pid)).then_some(()));
    }
}

#[test]
fn a_second_interrupt_ends_one_that_does_not_get_ready_too() {
    let scene = Scene::new();
    scene.script("stubborn.sh", "trap '' TERM\necho $$ > $1\nwhile :; do sleep 0.1; done\n");
    scene.script("deaf.sh", "setsid sh stubborn.sh far &\nexec sh stubborn.sh pid\n");
    let child = scene.start("sh deaf.sh {port}", &["--energy", "none", "--server", "stop_s=60"]);
    let pids = ["pid", "far"].map(|name| scene.process(name));
    signal(&child, "-INT");
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert!(pids.iter().all(|pid| !runs(*pid)));
}

#[test]
fn a_terminal_that_hangs_up_ends_the_run_in_good_order() {
    let scene = Scene::new();
    let mut child = scene.start("sh serve.sh {port}", &["--energy", "none"]);
    wait_for("a record", || (!recorded(&scene.folder()).is_empty()).then_some(()));
    // Nobody is there to read.
    drop((child.stdout.take(), child.stderr.take()));
    signal(&child, "-HUP");
    child.wait().unwrap();
    assert!(scene.event("server_stopped").is_some());
    assert!(scene.folder().join("summary.json").exists());
}

#[test]
fn bystanders_survive() {
    let scene = Scene::new();
    // A child that wattle has before it is wattle; what that starts, before the server and after it, loses its parent meanwhile.
    scene.script(
        "family.sh",
        "sleep 300 &\necho $! > early\nwhile [ ! -e up ]; do sleep 0.02; done\nsleep 300 &\necho $! > late\n",
    );
    scene.script("up.sh", "echo up > up\nwhile [ ! -e late ]; do sleep 0.02; done\nexec sh serve.sh $1\n");
    let wattle = scene.command("sh up.sh {port}", &["--energy", "none", "--max-queries", "3"]);
    let mut shell = Command::new("sh");
    shell.args([
        "-c",
        "sh family.sh > /dev/null 2>&1 & while [ ! -e early ]; do sleep 0.02; done; exec \"$@\"",
        "sh",
    ]);
    shell.arg(wattle.get_program()).args(wattle.get_args()).current_dir(scene.bench.path());
    for (name, value) in wattle.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let out = shell.output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    for name in ["early", "late"] {
        let pid = scene.process(name);
        assert!(runs(pid), "{name}");
        assert!(Command::new("kill").arg(pid.to_string()).status().unwrap().success());
    }
}

#[test]
fn it_does_not_outlive_a_wattle_that_is_killed() {
    let scene = Scene::new();
    scene.script("child.sh", "echo $$ > child\nwhile :; do sleep 1; done\n");
    scene.script("parent.sh", "sh child.sh &\necho $$ > parent\nexec sh serve.sh $1\n");
    let mut child = scene.start("sh parent.sh {port}", &["--energy", "none"]);
    let pids = [scene.process("parent"), scene.process("child")];
    wait_for("a record", || (!recorded(&scene.folder()).is_empty()).then_some(()));
    child.kill().unwrap();
    child.wait().unwrap();
    for pid in pids {
        wait_for("the end of the server", || (!runs(pid)).then_some(()));
    }
}

#[test]
fn one_that_dies_in_the_middle_is_told_and_what_was_answered_is_kept() {
    let scene = Scene::new();
    scene.script(
        "mortal.sh",
        "sh serve.sh $1 &\necho $! > pid\nwhile [ ! -e enough ]; do sleep 0.05; done\nkill -9 $!\necho 'bad: out of memory'\nexit 7\n",
    );
    let mut child = scene.start("sh mortal.sh {port}", &["--energy", "none", "--max-errors", "3"]);
    wait_for("records", || {
        (recorded(&scene.folder()).len() >= 3 || child.try_wait().unwrap().is_some()).then_some(())
    });
    scene.bench.write("enough", "");
    let out = child.wait_with_output().unwrap();
    failed(&out, &["requests in a row failed", "ended with exit code 7", "out of memory"]);
    let summary = summary(&scene.folder());
    let text = warned(&summary, "server_ended").unwrap();
    assert!(text.contains("exit code 7") && text.contains("bad: out of memory"), "{text}");
    let rows = summary["total_queries"].as_u64().unwrap();
    assert!((3..40).contains(&rows), "{rows}");
    assert!(scene.folder().join("requests.parquet").exists());
}

#[test]
fn it_gets_neither_our_key_nor_our_settings() {
    let scene = Scene::new();
    scene.script("spy.sh", "env > env\nexec sh serve.sh $1\n");
    let mut command = scene.command("sh spy.sh {port}", &["--energy", "none", "--max-queries", "2"]);
    command.env("OPENAI_API_KEY", "sk-mine").env("WATTLE_SEED", "5").env("HF_HOME", "/hub");
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    let env = scene.read("env").unwrap();
    assert!(!env.contains("sk-mine") && !env.contains("WATTLE_"), "{env}");
    assert!(env.contains("HF_HOME=/hub"), "{env}");
}

/// A GGUF file with one token that is no byte.
fn real_model(scene: &Scene) -> String {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/models/demo-300k-q8_0.gguf");
    let mut bytes = std::fs::read(file).unwrap();
    let at = bytes.windows(6).position(|w| w == b"<0x41>").unwrap();
    bytes[at..at + 6].copy_from_slice(b"answer");
    let path = scene.bench.path().join("real.gguf");
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

#[test]
fn a_file_that_the_engine_cannot_run_goes_to_llama_server() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::new();
    let model = real_model(&scene);
    let args = ["run", "--model", &model, "--name", "x", "--energy", "none", "--max-queries", "2"];
    let mut command = scene.bench.command(&args);
    command.env("PATH", "/bin:/usr/bin").env_remove("LLAMA_SERVER");
    failed(&command.output().unwrap(), &["install llama.cpp", "--client openai --url"]);

    let script = "#!/bin/sh\necho \"$@\" > args\nexport SIM_MODEL=$4\nexec sh serve.sh $8\n";
    let program = scene.bench.write("llama", script);
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let out = scene.bench.command(&args).env("LLAMA_SERVER", &program).output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    let summary = summary(&scene.folder());
    assert_eq!(summary["model"], "real");
    assert_eq!(summary["config"]["server"]["preset"], "llama-server");
    // A resumed run starts the same one, whatever the environment says then.
    assert_eq!(summary["config"]["server"]["program"], program);
    let told = scene.read("args").unwrap();
    assert!(told.starts_with(&format!("-m {model} --alias real --host 127.0.0.1 --port ")), "{told}");
}
