//! Requests of HTTP/1.1 as bytes come in.

use std::ops::Range;

/// A head longer than this is refused.
const LONGEST_HEAD: usize = 64 << 10;
/// A body longer than this is refused.
const LONGEST_BODY: usize = 64 << 20;

/// A whole request, as places in the bytes it was read from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Without the query.
    pub(crate) path: String,
    /// From `x-request-id`.
    pub(crate) id: Option<String>,
    /// The client wants no further request on this connection.
    pub(crate) close: bool,
    /// Where the body is; the request ends with it.
    pub(crate) body: Range<usize>,
}

/// What bytes are so far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// More must come.
    Partial,
    Whole(Head),
    /// No request of ours, and why.
    Bad(&'static str),
}

/// Looks for a whole request at the beginning of `bytes`.
pub(crate) fn parse(bytes: &[u8]) -> Parsed {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    let head = match request.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) if bytes.len() > LONGEST_HEAD => {
            return Parsed::Bad("the head is too long");
        }
        Ok(httparse::Status::Partial) => return Parsed::Partial,
        Err(_) => return Parsed::Bad("no HTTP/1.1 request"),
    };
    let (mut length, mut id, mut close) = (0, None, request.version == Some(0));
    for header in request.headers.iter() {
        let value = std::str::from_utf8(header.value).unwrap_or_default().trim();
        if header.name.eq_ignore_ascii_case("content-length") {
            match value.parse() {
                Ok(n) if n <= LONGEST_BODY => length = n,
                _ => return Parsed::Bad("no such content-length"),
            }
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Parsed::Bad("send a content-length");
        } else if header.name.eq_ignore_ascii_case("x-request-id") {
            id = Some(value.to_owned());
        } else if header.name.eq_ignore_ascii_case("connection") {
            close |= value.eq_ignore_ascii_case("close");
        }
    }
    if bytes.len() < head + length {
        return Parsed::Partial;
    }
    let path = request.path.unwrap_or_default();
    Parsed::Whole(Head {
        method: request.method.unwrap_or_default().to_owned(),
        path: path.split('?').next().unwrap_or(path).to_owned(),
        id,
        close,
        body: head..head + length,
    })
}

/// Appends a whole response.
pub(crate) fn respond(out: &mut Vec<u8>, status: &str, kind: &str, more: &str, body: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_bytes());
    out.extend_from_slice(b"\r\ncontent-type: ");
    out.extend_from_slice(kind.as_bytes());
    out.extend_from_slice(b"\r\ncontent-length: ");
    out.extend_from_slice(body.len().to_string().as_bytes());
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(more.as_bytes());
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
}

/// Appends one chunk of a chunked body.
pub(crate) fn chunk(out: &mut Vec<u8>, data: &[u8]) {
    chunk_of(out, b"", data);
}

/// The same, of two parts.
pub(crate) fn chunk_of(out: &mut Vec<u8>, before: &[u8], data: &[u8]) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let length = before.len() + data.len();
    let digits = (usize::BITS - length.leading_zeros()).div_ceil(4).max(1);
    out.extend((0..digits).rev().map(|digit| HEX[length >> (4 * digit) & 15]));
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(before);
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &[u8] =
        b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: h\r\nX-Request-Id: a7\r\nContent-Length: 4\r\n\r\nbodyGET";

    #[test]
    fn a_request_is_whole_only_with_its_body() {
        let end = REQUEST.len() - 3;
        assert!((0..end).all(|n| parse(&REQUEST[..n]) == Parsed::Partial));
        let Parsed::Whole(head) = parse(REQUEST) else { panic!("not whole") };
        assert_eq!((head.path.as_str(), head.id.as_deref()), ("/v1/chat/completions", Some("a7")));
        assert_eq!((&REQUEST[head.body.clone()], head.body.end), (&b"body"[..], end));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert!(matches!(parse(b"\x16\x03\x01 TLS hello\r\n\r\n"), Parsed::Bad(_)));
        assert!(matches!(parse(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), Parsed::Bad(_)));
    }

    #[test]
    fn a_chunk_says_its_length_in_hex() {
        for (length, head) in [(1, "1\r\n"), (16, "10\r\n"), (300, "12c\r\n"), (4095, "fff\r\n")] {
            let mut out = Vec::new();
            chunk(&mut out, &vec![b'x'; length]);
            assert!(out.starts_with(head.as_bytes()), "{length}");
            assert_eq!(out.len(), head.len() + length + 2);
        }
    }
}
