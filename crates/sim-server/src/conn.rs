//! One connection: what came in, what is to go out, and in which pieces.

use crate::answer::{Answer, Mark};
use crate::clock;
use crate::socket::Received;
use crate::trap::Trap;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::TcpStream;

/// A connection.
pub(crate) struct Conn {
    pub(crate) stream: TcpStream,
    /// From 1, as they were accepted.
    pub(crate) number: u64,
    pub(crate) input: Vec<u8>,
    /// When the last bytes of it came.
    pub(crate) received: Received,
    pub(crate) out: Vec<u8>,
    /// Bytes of `out` that are written.
    sent: usize,
    pub(crate) marks: VecDeque<Mark>,
    pub(crate) answer: Option<Box<Answer>>,
    cut: Option<Cut>,
    /// Before that moment nothing is written.
    pause_until: u64,
    /// Closed when all is written, whatever else.
    pub(crate) close: bool,
    /// The kernel tells us when it has room.
    pub(crate) waits_for_room: bool,
}

/// Where the stream of bytes is cut, and how long each pause is.
#[derive(Debug, Clone, Copy)]
enum Cut {
    EveryByte(u64),
    InsideCharacters(u64),
    /// Every byte of the head.
    Head(u64),
}

/// What became of writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Nothing is left.
    All,
    /// Go on at that moment.
    Later(u64),
    /// Go on when the kernel has room.
    Full,
    /// Nobody is there.
    Gone,
}

impl Conn {
    pub(crate) fn new(stream: TcpStream, number: u64) -> Conn {
        Conn {
            stream,
            number,
            input: Vec::new(),
            received: Received::default(),
            out: Vec::new(),
            sent: 0,
            marks: VecDeque::new(),
            answer: None,
            cut: None,
            pause_until: 0,
            close: false,
            waits_for_room: false,
        }
    }

    /// Takes up an answer.
    pub(crate) fn begin(&mut self, answer: Box<Answer>) {
        self.cut = answer.served.traps.iter().find_map(|trap| match trap {
            Trap::SplitLines(us) => Some(Cut::EveryByte(us * 1_000)),
            Trap::SplitUtf8(us) => Some(Cut::InsideCharacters(us * 1_000)),
            Trap::SlowLoris(ms) => Some(Cut::Head(ms * 1_000_000)),
            _ => None,
        });
        self.answer = Some(answer);
    }

    /// Lets go of an answer.
    pub(crate) fn end(&mut self) -> Option<Box<Answer>> {
        self.marks.clear();
        self.cut = None;
        self.pause_until = 0;
        self.answer.take()
    }

    /// Writes what there is, as far as it goes.
    pub(crate) fn flush(&mut self) -> Flushed {
        while self.sent < self.out.len() {
            let now = clock::now();
            if now < self.pause_until {
                return Flushed::Later(self.pause_until);
            }
            let (end, pause) = self.piece();
            // The stamp is taken before: what the client's kernel says is never earlier.
            match self.stream.write(&self.out[self.sent..end]) {
                Ok(written) => self.wrote(written, now),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Flushed::Full,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Flushed::Gone,
            }
            if self.sent == end {
                self.pause_until = now + pause;
            }
        }
        if self.out.capacity() > 1 << 20 {
            self.out = Vec::new();
        }
        self.out.clear();
        self.sent = 0;
        Flushed::All
    }

    /// The end of the next write, and the pause after it.
    fn piece(&self) -> (usize, u64) {
        let (all, next) = (self.out.len(), self.sent + 1);
        match self.cut {
            None => (all, 0),
            Some(Cut::EveryByte(pause)) => (next, pause),
            Some(Cut::InsideCharacters(pause)) => {
                let inside = self.out[next..].iter().position(|b| *b & 0b1100_0000 == 0b1000_0000);
                inside.map_or((all, 0), |at| (next + at, pause))
            }
            Some(Cut::Head(pause)) => {
                let head = self.out.windows(4).position(|w| w == b"\r\n\r\n").map_or(0, |at| at + 4);
                if next < head { (next, pause) } else { (all, 0) }
            }
        }
    }

    fn wrote(&mut self, bytes: usize, now: u64) {
        self.sent += bytes;
        let Some(answer) = &mut self.answer else { return };
        answer.served.first_byte.get_or_insert(now);
        answer.served.last_byte = Some(now);
        while let Some(mark) = self.marks.pop_front_if(|mark| mark.end <= self.sent) {
            answer.served.written.extend((0..mark.tokens).map(|_| now));
        }
    }
}
