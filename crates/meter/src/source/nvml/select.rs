//! Which boards are read: those the user names, else those CUDA shows this process, else all. Text in, positions out; no library.

use std::fmt;

/// What is known of a board before it is chosen.
#[derive(Debug, Clone)]
pub(super) struct Known {
    /// NVML's index, the one `nvidia-smi` shows.
    pub(super) index: u32,
    /// Its UUID; where it does not say one, its place.
    pub(super) id: String,
    /// Marketing name.
    pub(super) name: String,
    /// Where it is plugged in.
    pub(super) place: Option<Place>,
}

/// A PCI bus id. The function is always 0 on boards that NVML shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) domain: u32,
    pub(super) bus: u32,
    pub(super) device: u32,
}

/// What the user asked for.
#[derive(Debug, Default)]
pub(super) struct Asked<'a> {
    /// Boards, separated by commas; `all`.
    pub(super) device: Option<&'a str>,
    /// Processes, separated by commas.
    pub(super) pid: Option<&'a str>,
}

/// What CUDA was told for this process.
#[derive(Debug, Default)]
pub(super) struct Environment {
    /// `CUDA_VISIBLE_DEVICES`.
    pub(super) visible: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub(super) order: Option<String>,
}

/// What has to be asked of the library.
pub(super) trait Ask {
    /// The UUID of the board that holds a MIG instance.
    fn holder(&self, instance: &str) -> Option<String>;
    /// Whether a process computes or draws on the board at that position.
    fn runs(&self, board: usize, pid: u32) -> bool;
}

/// The boards chosen, and what is to be said about it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    /// Positions, in order, each once.
    pub(super) boards: Vec<usize>,
    /// By what.
    pub(super) by: String,
    /// Doubts.
    pub(super) notes: Vec<String>,
}

impl Environment {
    pub(super) fn here() -> Environment {
        let text = |name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
        Environment { visible: text("CUDA_VISIBLE_DEVICES"), order: text("CUDA_DEVICE_ORDER") }
    }
}

/// Chooses from `known`, or says why that leaves none.
pub(super) fn choose(
    known: &[Known],
    asked: &Asked,
    environment: &Environment,
    ask: &dyn Ask,
) -> Result<Choice, String> {
    let mut choice = match (asked.device, asked.pid, &environment.visible) {
        (Some("all"), ..) => Choice { by: "device=all".into(), ..all(known) },
        (Some(device), ..) => by_name(known, device, ask)?,
        (None, None, Some(visible)) => by_cuda(known, visible, environment, ask)?,
        (None, ..) => all(known),
    };
    if let Some(text) = asked.pid {
        let pids: Vec<u32> = text
            .split(',')
            .map(|pid| pid.trim().parse().map_err(|_| format!("nvml.pid={text} is no process number")))
            .collect::<Result<_, _>>()?;
        choice.boards.retain(|board| pids.iter().any(|pid| ask.runs(*board, *pid)));
        if choice.boards.is_empty() {
            return Err(format!(
                "nvml.pid={text} has nothing on any board (inside a container, NVML knows processes by the host's numbers)"
            ));
        }
        let by = format!("pid={text}");
        choice.by = if asked.device.is_some() { format!("{}, {by}", choice.by) } else { by };
    }
    choice.boards.sort_unstable();
    choice.boards.dedup();
    Ok(choice)
}

fn all(known: &[Known]) -> Choice {
    Choice { boards: (0..known.len()).collect(), by: "all there are".into(), notes: Vec::new() }
}

/// The user's own list: whatever it names has to be there.
fn by_name(known: &[Known], list: &str, ask: &dyn Ask) -> Result<Choice, String> {
    let mut choice = Choice { by: format!("device={list}"), ..Choice::default() };
    for entry in list.split(',').map(str::trim) {
        let by_index = || {
            let index: u32 = entry.parse().ok()?;
            known.iter().position(|k| k.index == index)
        };
        let by_place = || {
            let place = Place::parse(entry)?;
            known.iter().position(|k| k.place == Some(place))
        };
        let found = by_index()
            .or_else(by_place)
            .map(Ok)
            .unwrap_or_else(|| by_uuid(known, entry, ask, &mut choice.notes));
        choice.boards.push(found.map_err(|why| format!("nvml.device={list}: \"{entry}\" {why}"))?);
    }
    Ok(choice)
}

/// CUDA's list: what comes after an entry that names nothing is not seen either. CUDA C++ programming guide, environment
/// variables.
fn by_cuda(known: &[Known], list: &str, environment: &Environment, ask: &dyn Ask) -> Result<Choice, String> {
    let mut choice = Choice { by: format!("CUDA_VISIBLE_DEVICES={list}"), ..Choice::default() };
    // By PCI place, as CUDA counts boards that are alike; NVML's index is the same wherever that was seen, but not promised.
    let mut order: Vec<usize> = (0..known.len()).collect();
    if known.iter().all(|k| k.place.is_some()) {
        order.sort_by_key(|i| known[*i].place);
    }
    let mut by_index = false;
    for entry in list.split(',').map(str::trim) {
        let index: Option<usize> = entry.parse().ok();
        let found = match index {
            Some(index) => order.get(index).copied(),
            None => by_uuid(known, entry, ask, &mut choice.notes).ok(),
        };
        let Some(found) = found else { break };
        by_index |= index.is_some();
        choice.boards.push(found);
    }
    if choice.boards.is_empty() {
        return Err(format!("CUDA_VISIBLE_DEVICES={list} shows this process none of them"));
    }
    let differ = known.windows(2).any(|two| two[0].name != two[1].name);
    let settled = environment.order.as_deref() == Some("PCI_BUS_ID")
        || (0..known.len()).all(|i| choice.boards.contains(&i));
    if by_index && differ && !settled {
        choice.notes.push(
            "ambiguous: the boards differ, and CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; \
             counted by PCI place here"
                .into(),
        );
    }
    Ok(choice)
}

/// By UUID, by as much of one as no other board shares, or by a MIG instance on the board.
fn by_uuid(
    known: &[Known],
    entry: &str,
    ask: &dyn Ask,
    notes: &mut Vec<String>,
) -> Result<usize, &'static str> {
    const NOTHING: &str = "names no board";
    let exact = |id: &str| known.iter().position(|k| k.id.eq_ignore_ascii_case(id));
    if starts(entry, "MIG-") {
        // Before driver 470 an instance was called after its board: MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
        let old = entry[4..].split('/').next().filter(|id| starts(id, "GPU-"));
        let holder = old.map(str::to_owned).or_else(|| ask.holder(entry)).ok_or(NOTHING)?;
        let board = exact(&holder).ok_or(NOTHING)?;
        notes
            .push(format!("{entry} is a part of {}; the energy is that of the whole board", known[board].id));
        return Ok(board);
    }
    if let Some(board) = exact(entry) {
        return Ok(board);
    }
    let mut alike = known.iter().enumerate().filter(|(_, k)| starts(entry, "GPU-") && starts(&k.id, entry));
    match (alike.next(), alike.next()) {
        (Some((board, _)), None) => Ok(board),
        (None, _) => Err(NOTHING),
        (Some(_), Some(_)) => Err("is the beginning of more than one UUID"),
    }
}

fn starts(text: &str, with: &str) -> bool {
    text.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with))
}

impl Place {
    /// `00000000:01:00.0`, `0000:01:00.0`, `01:00.0`, and each without the function.
    pub(super) fn parse(text: &str) -> Option<Place> {
        let hex = |text: &str| u32::from_str_radix(text, 16).ok().filter(|_| !text.starts_with('+'));
        let (rest, device) = text.rsplit_once(':')?;
        let device = match device.split_once('.') {
            Some((device, "0")) => hex(device)?,
            Some(_) => return None,
            None => hex(device)?,
        };
        let (domain, bus) = rest.split_once(':').unwrap_or(("0", rest));
        Some(Place { domain: hex(domain)?, bus: hex(bus)?, device })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}", self.index, self.id, self.name)?;
        if let Some(place) = self.place.filter(|p| p.to_string() != self.id) {
            write!(f, ", {place}")?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One instance, on the second board, where also process 42 runs.
    struct Answers;

    impl Ask for Answers {
        fn holder(&self, instance: &str) -> Option<String> {
            (instance == "MIG-77").then(|| "GPU-ab".into())
        }

        fn runs(&self, board: usize, pid: u32) -> bool {
            (board, pid) == (1, 42)
        }
    }

    /// Three boards, the last of which is in the first slot.
    fn boards() -> Vec<Known> {
        let board = |index, id: &str, bus| Known {
            index,
            id: id.into(),
            name: "Same".into(),
            place: Some(Place { domain: 0, bus, device: 0 }),
        };
        vec![board(0, "GPU-aa", 0x81), board(1, "GPU-ab", 0x82), board(2, "GPU-c", 0x01)]
    }

    fn named(device: &str) -> Result<Choice, String> {
        choose(&boards(), &Asked { device: Some(device), pid: None }, &Environment::default(), &Answers)
    }

    fn seen(visible: &str) -> Result<Vec<usize>, String> {
        let environment = Environment { visible: Some(visible.into()), order: None };
        choose(&boards(), &Asked::default(), &environment, &Answers).map(|c| c.boards)
    }

    #[test]
    fn a_board_is_named_by_index_uuid_its_beginning_or_its_place() {
        for device in
            ["1", "GPU-ab", "gpu-AB", "0000:82:00.0", "00000000:82:00.0", "82:00.0", "82:00", " 1 , 1,GPU-ab"]
        {
            assert_eq!(named(device).map(|c| c.boards), Ok(vec![1]), "{device}");
        }
        assert_eq!(named("GPU-c,0").map(|c| c.boards), Ok(vec![0, 2]));
        assert_eq!(named("all").map(|c| c.boards), Ok(vec![0, 1, 2]));
    }

    #[test]
    fn a_name_that_fits_none_or_two_is_refused() {
        for (device, why) in [
            ("3", "\"3\" names no board"),
            ("0,GPU-x", "\"GPU-x\" names no board"),
            ("GPU-a", "more than one"),
            ("82:00.1", "names no board"),
            ("", "names no board"),
            ("-1", "names no board"),
            ("MIG-78", "names no board"),
        ] {
            let error = named(device).unwrap_err();
            assert!(error.contains(why), "{device}: {error}");
        }
    }

    #[test]
    fn a_mig_instance_stands_for_its_board_and_that_is_said() {
        for entry in ["MIG-77", "MIG-GPU-ab/3/0"] {
            let choice = named(entry).unwrap();
            assert_eq!(choice.boards, [1]);
            assert!(choice.notes[0].contains("GPU-ab; the energy is that of the whole board"), "{choice:?}");
        }
        assert_eq!(seen("MIG-77"), Ok(vec![1]));
    }

    #[test]
    fn an_entry_that_names_nothing_ends_what_cuda_shows() {
        assert_eq!(seen("0"), Ok(vec![2]), "CUDA counts by place");
        assert_eq!(seen("1, 2"), Ok(vec![0, 1]));
        assert_eq!(seen("0,9,1"), Ok(vec![2]));
        assert_eq!(seen("GPU-c,-1,GPU-aa"), Ok(vec![2]));
        assert_eq!(seen("GPU-c,81:00.0"), Ok(vec![2]), "CUDA knows no places");
        for none in ["", "-1", "NoDevFiles", "-1,0"] {
            assert!(seen(none).is_err_and(|why| why.contains("none of them")), "{none}");
        }
    }

    #[test]
    fn an_index_into_boards_that_differ_is_ambiguous() {
        let mut boards = boards();
        boards[0].name = "Other".into();
        let notes = |visible: &str, order: Option<&str>| {
            let environment = Environment { visible: Some(visible.into()), order: order.map(str::to_owned) };
            choose(&boards, &Asked::default(), &environment, &Answers).unwrap().notes.len()
        };
        assert_eq!(notes("0", None), 1);
        assert_eq!(notes("0", Some("FASTEST_FIRST")), 1);
        assert_eq!(notes("0", Some("PCI_BUS_ID")), 0);
        assert_eq!(notes("GPU-c", None), 0);
        assert_eq!(notes("0,1,2", None), 0, "all of them, in whatever order");
    }

    #[test]
    fn what_the_user_says_goes_before_what_cuda_was_told() {
        let environment = Environment { visible: Some("-1".into()), order: None };
        let choose = |device, pid| choose(&boards(), &Asked { device, pid }, &environment, &Answers);
        assert_eq!(choose(Some("all"), None).unwrap().boards, [0, 1, 2]);
        assert_eq!(choose(None, Some("7,42")).unwrap().boards, [1]);
        let both = choose(Some("0,1"), Some("42")).unwrap();
        assert_eq!((both.boards, both.by.as_str()), (vec![1], "device=0,1, pid=42"));
        assert!(choose(Some("0"), Some("42")).is_err());
        assert!(choose(None, Some("x")).unwrap_err().contains("no process number"));
    }
}
