//! Server-sent events, incrementally: a stream cut at any byte gives the same events.

/// A line longer than this is not a token stream; refuse it rather than fill the memory.
pub const LONGEST_LINE: usize = 4 << 20;

/// The stream held a line, or an event, longer than [`LONGEST_LINE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {} MiB", LONGEST_LINE >> 20)]
pub struct TooLong;

/// Collects bytes and hands out the data of each event.
#[derive(Debug, Default)]
pub struct Decoder {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_cr: bool,
}

impl Decoder {
    /// Feeds bytes as they arrived; calls `on` with the data of every event they complete.
    pub fn push(&mut self, mut bytes: &[u8], mut on: impl FnMut(&[u8])) -> Result<(), TooLong> {
        // A line ends with LF, CR or CRLF; the LF of a CRLF ends nothing more.
        if std::mem::take(&mut self.after_cr) && bytes.first() == Some(&b'\n') {
            bytes = &bytes[1..];
        }
        while let Some(end) = memchr::memchr2(b'\n', b'\r', bytes) {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            let crlf = bytes[end] == b'\r' && rest.first() == Some(&b'\n');
            self.after_cr = bytes[end] == b'\r' && rest.is_empty();
            bytes = if crlf { &rest[1..] } else { rest };
            if self.line.is_empty() {
                // Most lines come whole and are looked at where they are.
                self.end_line(line, &mut on)?;
            } else {
                self.keep(line)?;
                let whole = std::mem::take(&mut self.line);
                let ended = self.end_line(&whole, &mut on);
                self.line = whole;
                self.line.clear();
                ended?;
            }
        }
        self.keep(bytes)
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        if self.line.len() + bytes.len() > LONGEST_LINE {
            return Err(TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    /// The end of the stream: an event that lacked its blank line is still an event (many servers forget it).
    pub fn finish(&mut self, mut on: impl FnMut(&[u8])) -> Result<(), TooLong> {
        let last = std::mem::take(&mut self.line);
        if !last.is_empty() {
            self.end_line(&last, &mut on)?;
        }
        self.end_event(&mut on);
        Ok(())
    }

    fn end_line(&mut self, line: &[u8], on: &mut impl FnMut(&[u8])) -> Result<(), TooLong> {
        if line.is_empty() {
            self.end_event(on);
            return Ok(());
        }
        // Comments (`: …`) and the fields event, id and retry carry nothing we need.
        if let Some(value) = line.strip_prefix(b"data:") {
            let value = value.strip_prefix(b" ").unwrap_or(value);
            if self.data.len() + value.len() >= LONGEST_LINE {
                return Err(TooLong);
            }
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
            self.has_data = true;
        }
        Ok(())
    }

    fn end_event(&mut self, on: &mut impl FnMut(&[u8])) {
        if std::mem::take(&mut self.has_data) {
            on(&self.data);
            self.data.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(pieces: &[&[u8]]) -> Vec<String> {
        let mut out = Vec::new();
        let mut decoder = Decoder::default();
        for piece in pieces {
            decoder.push(piece, |d| out.push(String::from_utf8_lossy(d).into_owned())).unwrap();
        }
        decoder.finish(|d| out.push(String::from_utf8_lossy(d).into_owned())).unwrap();
        out
    }

    #[test]
    fn events_comments_and_line_endings() {
        let text = b": ping\n\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\n\nid: 3\n\ndata: \xc3\xa4\r\rdata: last";
        assert_eq!(decode(&[text]), ["one", "two\nlines", "ä", "last"]);
    }

    #[test]
    fn the_lf_of_a_crlf_ends_no_event() {
        for ending in ["\n", "\r\n", "\r"] {
            let text = format!("data: two{ending}data: lines{ending}{ending}");
            assert_eq!(decode(&[text.as_bytes()]), ["two\nlines"], "{ending:?}");
        }
    }

    #[test]
    fn a_gigantic_line_is_refused() {
        let mut decoder = Decoder::default();
        let mib = vec![b'x'; 1 << 20];
        let result = (0..8).try_for_each(|_| decoder.push(&mib, |_| {}));
        assert_eq!(result, Err(TooLong));
    }

    proptest! {
        #[test]
        fn a_stream_cut_anywhere_gives_the_same_events(
            events in prop::collection::vec("[a-zäß€😀 :]{0,12}", 0..8),
            ending in prop::sample::select(vec!["\n", "\r\n", "\r"]),
            cuts in prop::collection::vec(0usize..200, 0..20),
        ) {
            let text: String = events.iter().map(|e| format!("data: {e}{ending}{ending}")).collect();
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(decode(&pieces), events);
        }
    }
}
