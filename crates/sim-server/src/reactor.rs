//! The one thread of a server: sockets by epoll, tokens by a heap of absolute moments and one timer.

use crate::answer::{Answer, State};
use crate::conn::{Conn, Flushed};
use crate::desk::Desk;
use crate::engine::{Engine, Told};
use crate::http::{self, Parsed};
use crate::log::Log;
use crate::served::{Outcome, Served};
use crate::trap::Trap;
use crate::{Config, Shared, clock, priority, socket};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use wattle_sim_nvml::Live;

/// What epoll calls those that are no connection.
const LISTENER: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
const WAKE: u64 = u64::MAX - 2;
/// Events taken at once.
const EVENTS: usize = 256;
/// Read at once.
const READ: usize = 64 << 10;
/// A stalled server looks so often whether it is to stop.
const STALL_STEP_NS: u64 = 20_000_000;
/// How long it waits where no connection more fits.
const NO_ROOM: Duration = Duration::from_millis(1);

/// Whether a connection is still there.
#[derive(PartialEq, Eq)]
enum Fate {
    Stays,
    Goes,
}

/// A moment at which an answer goes on: when, in which slot, which request.
type Alarm = Reverse<(u64, usize, u64)>;

/// Everything the thread owns.
pub(crate) struct Reactor {
    epoll: OwnedFd,
    timer: OwnedFd,
    wake: Arc<OwnedFd>,
    listener: TcpListener,
    shared: Arc<Shared>,
    conns: Vec<Option<Box<Conn>>>,
    free: Vec<usize>,
    /// Slots left in this round; events of this round may still name them.
    freed: Vec<usize>,
    alarms: BinaryHeap<Alarm>,
    /// What the timer is set to; 0 is nothing.
    armed: u64,
    desk: Desk,
    engine: Option<Engine>,
    live: Option<(Live, usize)>,
    told: Vec<Told>,
    /// When the last request for the engine came.
    arrived: u64,
    /// Where the requests in the engine are.
    slots: HashMap<u64, usize>,
    /// Answers given whose joules the engine has yet to tell.
    unsettled: HashMap<u64, Served>,
    stalled_until: u64,
    realtime: bool,
    log: Log,
    /// Ends the server at the end of this round.
    trouble: Option<io::Error>,
    buffer: Vec<u8>,
}

impl Reactor {
    pub(crate) fn new(config: Config, shared: Arc<Shared>) -> io::Result<Reactor> {
        let listener = socket::listen(&config.listen)?;
        // Connections inherit it.
        sockopt::set_tcp_nodelay(&listener, true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &*wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let live = match config.engine.as_ref().and_then(|e| e.live.as_ref().map(|path| (path, e))) {
            Some((path, engine)) => {
                let mut live = Live::create(path)?;
                live.set(engine.board, engine.idle_watts)?;
                Some((live, engine.board))
            }
            None => None,
        };
        Ok(Reactor {
            epoll,
            timer,
            wake,
            listener,
            conns: Vec::new(),
            free: Vec::new(),
            freed: Vec::new(),
            alarms: BinaryHeap::new(),
            armed: 0,
            engine: config.engine.clone().map(|engine| Engine::new(engine, clock::now())),
            live,
            told: Vec::new(),
            arrived: 0,
            slots: HashMap::new(),
            unsettled: HashMap::new(),
            stalled_until: 0,
            realtime: config.realtime,
            log: Log::new(&config, Arc::clone(&shared))?,
            trouble: None,
            desk: Desk::new(config),
            shared,
            buffer: vec![0; READ],
        })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub(crate) fn wake(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    /// Serves until told to stop.
    pub(crate) fn run(mut self) -> io::Result<()> {
        if self.realtime {
            priority::first();
        }
        let mut events = Vec::with_capacity(EVENTS);
        while !self.shared.stop.load(Ordering::Relaxed) {
            let wait = self.arm()?;
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), wait.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for event in &events {
                let (data, flags) = (event.data.u64(), event.flags);
                match data {
                    LISTENER => self.accept()?,
                    TIMER => {
                        // It rings until it is read, and there may be nothing to set it to.
                        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                        self.armed = 0;
                    }
                    WAKE => {}
                    slot => self.on_event(slot as usize, flags),
                }
            }
            self.stall();
            self.on_time();
            self.free.append(&mut self.freed);
            self.trouble.take().map_or(Ok(()), Err)?;
        }
        self.log.finish()
    }

    /// Sets the timer to the next moment; `Some(0)` if that is now.
    fn arm(&mut self) -> io::Result<Option<Timespec>> {
        let alarm = self.alarms.peek().map(|Reverse((at, ..))| *at);
        let engine = self.engine.as_ref().and_then(Engine::due);
        let Some(next) = [alarm, engine].into_iter().flatten().min() else { return Ok(None) };
        if next <= clock::now() {
            return Ok(Some(Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
        if self.armed != next {
            let at = Timespec { tv_sec: (next / 1_000_000_000) as i64, tv_nsec: (next % 1_000_000_000) as _ };
            let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: at };
            // Setting it also takes back that it rang.
            timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once)?;
            self.armed = next;
        }
        Ok(None)
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let stream = match accept_with(&self.listener, flags) {
                Ok(stream) => TcpStream::from(stream),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    std::thread::sleep(NO_ROOM); // epoll would tell us again at once
                    return Ok(());
                }
                Err(e) => return Err(e.into()),
            };
            let slot = self.free.pop().unwrap_or(self.conns.len());
            if slot == self.conns.len() {
                self.conns.push(None);
            }
            let interest = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
            epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(slot as u64), interest)?;
            let number = self.shared.connections.fetch_add(1, Ordering::SeqCst) as u64 + 1;
            self.conns[slot] = Some(Box::new(Conn::new(stream, number)));
        }
    }

    /// Lends a connection out of its slot, and puts it back if it stays.
    fn with(&mut self, slot: usize, act: impl FnOnce(&mut Reactor, &mut Conn) -> Fate) {
        let Some(mut conn) = self.conns.get_mut(slot).and_then(Option::take) else { return };
        match act(self, &mut conn) {
            Fate::Stays => self.conns[slot] = Some(conn),
            Fate::Goes => {
                self.lose(&mut conn);
                self.freed.push(slot); // closing the socket takes it out of epoll
            }
        }
    }

    fn on_event(&mut self, slot: usize, flags: epoll::EventFlags) {
        self.with(slot, |reactor, conn| {
            let coming = epoll::EventFlags::IN
                | epoll::EventFlags::RDHUP
                | epoll::EventFlags::HUP
                | epoll::EventFlags::ERR;
            if flags.intersects(coming) && reactor.read(conn) == Fate::Goes {
                return Fate::Goes;
            }
            reactor.drive(slot, conn)
        });
    }

    fn read(&mut self, conn: &mut Conn) -> Fate {
        loop {
            match socket::receive(&conn.stream, &mut self.buffer) {
                Ok((0, _)) => return Fate::Goes,
                Ok((read, received)) => {
                    conn.input.extend_from_slice(&self.buffer[..read]);
                    conn.received = received;
                    // A short read is all there was; epoll says if more comes.
                    if read < self.buffer.len() {
                        return Fate::Stays;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Fate::Stays,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Fate::Goes,
            }
        }
    }

    /// Takes requests and writes answers until one has to wait.
    fn drive(&mut self, slot: usize, conn: &mut Conn) -> Fate {
        loop {
            if conn.answer.is_none() && conn.out.is_empty() && !self.take(slot, conn) {
                return Fate::Stays;
            }
            match conn.flush() {
                Flushed::Gone => return Fate::Goes,
                Flushed::Later(at) => {
                    let number = conn.answer.as_ref().map_or(0, |a| a.served.number);
                    self.alarms.push(Reverse((at, slot, number)));
                    return Fate::Stays;
                }
                Flushed::Full => return self.listen_for_room(slot, conn, true),
                Flushed::All if conn.waits_for_room => {
                    if self.listen_for_room(slot, conn, false) == Fate::Goes {
                        return Fate::Goes;
                    }
                }
                Flushed::All => {}
            }
            if let Some(answer) = &conn.answer {
                match answer.state {
                    State::Speaking | State::Silent => return Fate::Stays,
                    State::Cut => return Fate::Goes,
                    State::Complete => conn.close |= answer.close,
                }
                self.finish(conn);
            }
            if conn.close {
                return Fate::Goes;
            }
        }
    }

    fn listen_for_room(&mut self, slot: usize, conn: &mut Conn, wanted: bool) -> Fate {
        if conn.waits_for_room != wanted {
            let mut interest = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
            interest.set(epoll::EventFlags::OUT, wanted);
            let data = epoll::EventData::new_u64(slot as u64);
            if epoll::modify(&self.epoll, &conn.stream, data, interest).is_err() {
                return Fate::Goes;
            }
            conn.waits_for_room = wanted;
        }
        Fate::Stays
    }

    /// Takes the next request, if it is whole.
    fn take(&mut self, slot: usize, conn: &mut Conn) -> bool {
        let head = match http::parse(&conn.input) {
            Parsed::Partial => return false,
            Parsed::Whole(head) => head,
            Parsed::Bad(why) => {
                http::respond(
                    &mut conn.out,
                    "400 Bad Request",
                    "text/plain",
                    "connection: close\r\n",
                    why.as_bytes(),
                );
                conn.input.clear();
                conn.close = true;
                return true;
            }
        };
        (self.desk.counts.running, self.desk.counts.waiting) =
            self.engine.as_ref().map_or((self.shared.speaking.load(Ordering::Relaxed), 0), Engine::load);
        let body = &conn.input[head.body.clone()];
        let answer = self.desk.take(&head, body, conn.received, conn.number, &mut conn.out);
        conn.input.drain(..head.body.end);
        match answer {
            None => conn.close |= head.close,
            Some(mut answer) => {
                self.shared.speaking.fetch_add(1, Ordering::Relaxed);
                for trap in &answer.served.traps {
                    if let Trap::Stall(ms) = trap {
                        self.stalled_until = answer.served.received + ms * 1_000_000;
                    }
                }
                let served = &answer.served;
                let number = served.number;
                match (&mut self.engine, answer.state == State::Speaking) {
                    (Some(engine), true) if answer.in_engine => {
                        engine.arrive(number, served.prompt_tokens, u64::from(served.output_tokens));
                        self.slots.insert(number, slot);
                        self.arrived = self.arrived.max(served.received);
                    }
                    (_, speaking) => {
                        answer.in_engine = false;
                        if speaking {
                            self.alarms.push(Reverse((answer.due, slot, number)));
                        }
                    }
                }
                conn.begin(answer);
            }
        }
        true
    }

    /// The answer of a connection is over.
    fn finish(&mut self, conn: &mut Conn) {
        let Some(answer) = conn.end() else { return };
        self.shared.speaking.fetch_sub(1, Ordering::Relaxed);
        let served = answer.served;
        self.desk.counts.finished += u64::from(served.outcome == Outcome::Finished);
        if answer.in_engine && served.joules.is_none() {
            self.unsettled.insert(served.number, served);
        } else {
            self.log(served);
        }
    }

    fn log(&mut self, served: Served) {
        self.trouble = self.log.add(served).err().or(self.trouble.take());
    }

    /// A connection is no more; whatever it was answering ends.
    fn lose(&mut self, conn: &mut Conn) {
        let Some(answer) = &mut conn.answer else { return };
        if matches!(answer.state, State::Speaking | State::Complete)
            && answer.served.outcome == Outcome::Finished
        {
            answer.served.outcome = Outcome::Left;
        }
        self.leave_engine(conn);
        self.finish(conn);
    }

    fn leave_engine(&mut self, conn: &Conn) {
        if let (Some(engine), Some(answer)) = (&mut self.engine, &conn.answer)
            && answer.in_engine
        {
            engine.leave(answer.served.number, &mut self.told);
        }
    }

    /// Nobody gets a byte.
    fn stall(&mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let left = self.stalled_until.saturating_sub(clock::now());
            if left == 0 {
                break;
            }
            std::thread::sleep(Duration::from_nanos(left.min(STALL_STEP_NS)));
        }
    }

    /// Does what is due.
    fn on_time(&mut self) {
        let now = clock::now();
        while let Some(Reverse((at, slot, number))) = self.alarms.peek().copied() {
            if at > now {
                break;
            }
            self.alarms.pop();
            self.with(slot, |reactor, conn| reactor.on_alarm(slot, number, conn));
        }
        if self.engine.as_ref().and_then(Engine::due).is_some_and(|due| due <= now) {
            self.turn(now);
        }
        while !self.told.is_empty() {
            for told in std::mem::take(&mut self.told) {
                self.on_told(told);
            }
        }
    }

    fn on_alarm(&mut self, slot: usize, number: u64, conn: &mut Conn) -> Fate {
        let Conn { answer: Some(answer), out, marks, .. } = conn else { return Fate::Stays };
        if answer.served.number != number {
            return Fate::Stays; // an older answer's
        }
        if !answer.in_engine && answer.state == State::Speaking {
            let before = (answer.due, answer.served.scheduled.len());
            answer.tokens_until(clock::now(), out, marks);
            self.desk.counts.add(&answer.served, before.1);
            if answer.state == State::Speaking && answer.due != before.0 {
                self.alarms.push(Reverse((answer.due, slot, number)));
            }
        }
        self.drive(slot, conn)
    }

    /// The engine's iteration is over.
    fn turn(&mut self, now: u64) {
        let Some(engine) = &mut self.engine else { return };
        // By the simulation's own time, however late we are; but no request is worked on before it came.
        let simulated = engine.due().unwrap_or_default().max(self.arrived);
        let live = &mut self.live;
        let stamp = |watts: f64| match live {
            // What the file says is what the board draws, from the moment that it says.
            Some((live, board)) => live.set(*board, watts).unwrap_or(now),
            None => simulated,
        };
        engine.turn(stamp, &mut self.told);
    }

    fn on_told(&mut self, told: Told) {
        match told {
            Told::Begun { id, at } => {
                if let Some(answer) = self.in_engine(id) {
                    answer.served.begun = Some(at);
                }
            }
            Told::Token { id, due } => {
                let Some(slot) = self.slots.get(&id).copied() else { return };
                self.with(slot, |reactor, conn| {
                    let Conn { answer: Some(answer), out, marks, .. } = conn else { return Fate::Stays };
                    if answer.served.number != id || answer.state != State::Speaking {
                        return Fate::Stays;
                    }
                    let before = answer.served.scheduled.len();
                    answer.token(due, out, marks);
                    reactor.desk.counts.add(&answer.served, before);
                    if answer.wants_no_more() {
                        reactor.leave_engine(conn);
                    }
                    reactor.drive(slot, conn)
                });
            }
            Told::Over { id, joules } => {
                if let Some(mut served) = self.unsettled.remove(&id) {
                    served.joules = Some(joules);
                    self.log(served);
                } else if let Some(answer) = self.in_engine(id) {
                    answer.served.joules = Some(joules);
                }
                self.slots.remove(&id);
            }
        }
    }

    /// The answer to a request in the engine, if its connection still waits for it.
    fn in_engine(&mut self, id: u64) -> Option<&mut Answer> {
        let slot = *self.slots.get(&id)?;
        let answer = self.conns[slot].as_mut()?.answer.as_deref_mut()?;
        (answer.served.number == id).then_some(answer)
    }
}
