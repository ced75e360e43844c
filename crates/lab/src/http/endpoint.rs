//! Where a server is, and how it is reached.

use super::one::{One, Stream};
use super::socket::Socket;
use super::{Connection, Shared, Trouble, Version};
use crate::LabError;
use crate::client::Place;
use hyper::Uri;
use hyper::client::conn::http2;
use hyper::header::HeaderValue;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use wattle_core::exchange::FailureClass;

/// Where a server is.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(super) url: String,
    host: String,
    port: u16,
    /// What the Host header says.
    pub(super) authority: HeaderValue,
    /// Path before every request's own, without a slash at its end.
    pub(super) base: String,
    /// `http` or `https`.
    pub(super) scheme: &'static str,
    tls: Option<TlsConnector>,
    version: Version,
    /// Asked for once: a name server is not part of what is measured.
    addresses: OnceLock<Vec<SocketAddr>>,
    place: OnceLock<Place>,
}

impl Endpoint {
    /// Reads an address. Without a path, `usual` is meant; the `endings` of a path are left out.
    pub(crate) fn parse(
        url: &str,
        version: Version,
        usual: &str,
        endings: &[&str],
    ) -> Result<Self, LabError> {
        // What stands before an @ or after a ? may be a secret.
        let shown = if url.contains(['@', '?']) { "…" } else { url };
        let bad = |why: &str| {
            LabError::Usage(format!("--url {shown}: {why}; for example http://127.0.0.1:8000{usual}"))
        };
        let uri: Uri = url.parse().map_err(|_| bad("not a URL"))?;
        let (tls, usual_port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => (Some(tls(version)), 443),
            _ => return Err(bad("must start with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| bad("names no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("must not hold a password; give the key by OPENAI_API_KEY or key_file"));
        }
        if uri.query().is_some() {
            return Err(bad("must not hold a query; give the key by OPENAI_API_KEY or key_file"));
        }
        let base = match uri.path().trim_end_matches('/') {
            "" => usual,
            path => endings.iter().find_map(|ending| path.strip_suffix(ending)).unwrap_or(path),
        };
        Ok(Self {
            url: url.to_owned(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(usual_port),
            authority: HeaderValue::from_str(authority.as_str()).map_err(|_| bad("not a URL"))?,
            base: base.to_owned(),
            scheme: if tls.is_some() { "https" } else { "http" },
            tls,
            version,
            addresses: OnceLock::new(),
            place: OnceLock::new(),
        })
    }

    /// The same server, its paths without this ending before them.
    pub(crate) fn without(&self, ending: &str) -> Self {
        let base = self.base.strip_suffix(ending).unwrap_or(&self.base).to_owned();
        Self { base, ..self.clone() }
    }

    /// Whether a connection carries several requests at once.
    pub(super) fn shares(&self) -> bool {
        self.version == Version::Http2
    }

    /// Where its joules are drawn.
    pub(crate) fn place(&self) -> Place {
        self.place.get_or_init(|| self.look_for_place()).clone()
    }

    fn look_for_place(&self) -> Place {
        // An address is this machine's if a socket can be bound to it; nothing is sent.
        let ours = |address: SocketAddr| {
            address.ip().to_canonical().is_loopback() || UdpSocket::bind((address.ip(), 0)).is_ok()
        };
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        if found.is_ok_and(|mut all| all.any(ours)) {
            Place::ThisHost
        } else {
            Place::Elsewhere { host: self.host.clone() }
        }
    }

    async fn addresses(&self) -> Result<&[SocketAddr], Trouble> {
        if let Some(known) = self.addresses.get() {
            return Ok(known);
        }
        let found =
            tokio::net::lookup_host((self.host.as_str(), self.port)).await.map_err(Trouble::refused)?;
        Ok(self.addresses.get_or_init(|| found.collect()))
    }

    /// Opens a connection.
    pub(super) async fn connect(&self, patience: Duration) -> Result<Connection, Trouble> {
        tokio::time::timeout(patience, self.connect_at_all()).await.unwrap_or_else(|_| {
            let error = format!("no connection after {} s; raise connect_timeout_s", patience.as_secs_f64());
            Err(Trouble { again: super::Again::Soon, ..Trouble::new(FailureClass::Timeout, error) })
        })
    }

    async fn connect_at_all(&self) -> Result<Connection, Trouble> {
        let tcp = TcpStream::connect(self.addresses().await?).await.map_err(Trouble::refused)?;
        tcp.set_nodelay(true).map_err(Trouble::refused)?;
        let (socket, traffic) = Socket::new(tcp);
        let stream = match &self.tls {
            None => Stream::Plain(socket),
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(Trouble::refused)?;
                let tls = tls.connect(name, socket).await.map_err(Trouble::refused)?;
                if self.version == Version::Http2 && tls.get_ref().1.alpn_protocol() != Some(b"h2") {
                    return Err(Trouble::protocol("the server does not speak HTTP/2; leave out http=2"));
                }
                Stream::Tls(Box::new(tls))
            }
        };
        match self.version {
            Version::Http1 => Ok(Connection::One(One::new(stream, traffic))),
            Version::Http2 => {
                let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                    .await
                    .map_err(Trouble::refused)?;
                // Ends by itself when its senders are dropped or the server hangs up; errors reach the requests in flight.
                tokio::spawn(connection);
                Ok(Connection::Two(Shared { sender, streams: Arc::default() }))
            }
        }
    }
}

fn tls(version: Version) -> TlsConnector {
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = match version {
        Version::Http1 => vec![b"http/1.1".to_vec()],
        Version::Http2 => vec![b"h2".to_vec()],
    };
    TlsConnector::from(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Endpoint, LabError> {
        Endpoint::parse(url, Version::Http1, "/v1", &["/chat/completions"])
    }

    #[test]
    fn urls_are_understood_or_refused() {
        let base = |url: &str| parse(url).map(|e| (e.host, e.port, e.base)).ok();
        let is = |host: &str, port, base: &str| Some((host.to_owned(), port, base.to_owned()));
        assert_eq!(base("http://127.0.0.1:8000"), is("127.0.0.1", 8000, "/v1"));
        assert_eq!(base("http://[::1]:8000/v1/"), is("::1", 8000, "/v1"));
        assert_eq!(base("https://api.example.com/openai/v1"), is("api.example.com", 443, "/openai/v1"));
        assert_eq!(base("http://h/v1/chat/completions"), is("h", 80, "/v1"));
        let root = |url: &str| parse(url).map(|e| e.without("/v1").base).ok();
        assert_eq!(root("http://h"), Some(String::new()));
        assert_eq!(root("http://h/openai/v1/"), Some("/openai".into()));
        assert_eq!(root("http://h/elsewhere"), Some("/elsewhere".into()));
        for wrong in [
            "127.0.0.1:8000",
            "ftp://x",
            "http://",
            "http://user:secret@h/v1",
            "http://h/v1?key=secret",
            "not a url",
        ] {
            assert!(base(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn only_this_machine_is_this_host() {
        let place = |url: &str| parse(url).unwrap().place();
        assert_eq!(place("http://localhost:1"), Place::ThisHost);
        assert_eq!(place("http://[::1]:1"), Place::ThisHost);
        assert_eq!(place("http://0.0.0.0:1"), Place::ThisHost);
        assert_eq!(place("http://192.0.2.7:1"), Place::Elsewhere { host: "192.0.2.7".into() });
        assert_eq!(place("http://gpu1.invalid:1"), Place::Elsewhere { host: "gpu1.invalid".into() });
    }
}
