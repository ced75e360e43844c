//! The byte-level vocabulary: every token is one byte of UTF-8 text, or a marker without text.
//!
//! This is the whole tokenizer. A vocabulary with longer tokens needs merges and normalisation
//! that real servers do right, so it is refused rather than approximated.

use super::error::EngineError;
use super::gguf::Gguf;

const TOKENS: &str = "tokenizer.ggml.tokens";

/// The tokens of a byte-level model.
#[derive(Debug, Clone)]
pub struct Vocab {
    bytes: Vec<Option<u8>>,
    ids: [u32; 256],
    /// What a text is preceded by: the beginning-of-sequence marker, unless the model wants none.
    bos: Option<u32>,
    eos: u32,
    /// Whether a text is read as if a space came before it, as SentencePiece does.
    space_prefix: bool,
}

impl Vocab {
    pub(super) fn read(gguf: &Gguf<'_>) -> Result<Self, EngineError> {
        let tokens: Vec<&str> = gguf.need(TOKENS)?;
        // The defaults here are those of llama.cpp's "llama" tokenizer.
        let unk = gguf.get("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
        let bos = gguf.get("tokenizer.ggml.bos_token_id")?.unwrap_or(1);
        let add_bos = gguf.get("tokenizer.ggml.add_bos_token")?.unwrap_or(true);
        let eos = gguf.get("tokenizer.ggml.eos_token_id")?.unwrap_or(2);
        let space_prefix = gguf.get("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);

        let mut bytes = vec![None; tokens.len()];
        let mut ids = [None; 256];
        for (id, token) in (0..).zip(&tokens) {
            if [unk, bos, eos].contains(&id) {
                continue;
            }
            let byte = byte_of(token).ok_or(EngineError::NotByteLevel { tokens: tokens.len() })?;
            bytes[id as usize] = Some(byte);
            // Of two spellings of a byte, a plain one wins over `<0xNN>`, as in llama.cpp.
            if ids[usize::from(byte)].is_none() || !token.starts_with("<0x") {
                ids[usize::from(byte)] = Some(id);
            }
        }
        if let Some(byte) = ids.iter().position(Option::is_none) {
            return Err(EngineError::metadata(TOKENS, format!("has no token for the byte {byte:#04x}")));
        }
        Ok(Self {
            bytes,
            ids: ids.map(Option::unwrap_or_default),
            bos: add_bos.then_some(bos),
            eos,
            space_prefix,
        })
    }

    /// The ids of a text: the beginning-of-sequence marker, then one token per byte.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let space = if self.space_prefix && !text.is_empty() { " " } else { "" };
        let bytes = space.bytes().chain(text.bytes());
        self.bos.into_iter().chain(bytes.map(|byte| self.ids[usize::from(byte)])).collect()
    }

    /// The bytes of some ids; markers and unknown ids have none.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().filter_map(|id| self.byte(*id)).collect()
    }

    /// The byte that a token stands for, unless it is a marker.
    pub fn byte(&self, id: u32) -> Option<u8> {
        *self.bytes.get(usize::try_from(id).ok()?)?
    }

    /// The token that ends an answer.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> usize {
        self.bytes.len()
    }
}

/// `<0x0A>` is a byte by number, `▁` is SentencePiece's space, any other ASCII character is itself.
fn byte_of(token: &str) -> Option<u8> {
    if let Some(hex) = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')) {
        return u8::from_str_radix(hex, 16).ok();
    }
    match token.as_bytes() {
        [byte] => Some(*byte),
        _ => (token == "▁").then_some(b' '),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{Writer, tokens};
    use super::*;

    fn read(tokens: &[String], space_prefix: Option<bool>) -> Result<Vocab, EngineError> {
        let mut writer = Writer::new();
        writer.texts(TOKENS, tokens);
        if let Some(space_prefix) = space_prefix {
            writer.flag("tokenizer.ggml.add_space_prefix", space_prefix);
        }
        Vocab::read(&Gguf::parse(&writer.finish())?)
    }

    #[test]
    fn a_text_comes_back_from_its_ids() {
        let vocab = read(&tokens(), Some(false)).unwrap();
        let text: String = (0..=0x2fff).filter_map(char::from_u32).collect();
        let ids = vocab.encode(&text);
        assert_eq!(ids.len(), 1 + text.len());
        assert_eq!(ids[0], 1);
        assert_eq!(vocab.decode(&ids), text.as_bytes());
        assert_eq!(vocab.encode(" a"), [1, 35, 100]);
    }

    #[test]
    fn markers_and_unknown_ids_have_no_text() {
        let vocab = read(&tokens(), Some(false)).unwrap();
        assert_eq!(vocab.decode(&[0, 1, 2, 259, u32::MAX]), b"");
    }

    #[test]
    fn a_space_comes_first_where_llama_cpp_would_put_one() {
        for (asked, ids) in [(None, &[1, 35, 100][..]), (Some(true), &[1, 35, 100]), (Some(false), &[1, 100])]
        {
            assert_eq!(read(&tokens(), asked).unwrap().encode("a"), ids);
        }
        assert_eq!(read(&tokens(), None).unwrap().encode(""), [1]);
    }

    #[test]
    fn a_plain_spelling_wins_over_a_byte_by_number() {
        let mut tokens = tokens();
        tokens.extend(["a".to_owned(), "<0x62>".to_owned()]);
        let vocab = read(&tokens, Some(false)).unwrap();
        assert_eq!(vocab.encode("ab"), [1, 259, 101]);
        assert_eq!(vocab.decode(&[100, 259, 101, 260]), b"aabb");
    }

    #[test]
    fn longer_tokens_are_refused() {
        for longer in ["ab", "é", "▁▁", "▁a", "<0x100>", "<0x>", ""] {
            let mut tokens = tokens();
            tokens.push(longer.to_owned());
            let error = read(&tokens, None).unwrap_err();
            assert_eq!(error, EngineError::NotByteLevel { tokens: 260 }, "{longer}");
        }
    }

    #[test]
    fn a_missing_byte_is_named() {
        let tokens: Vec<String> = tokens().into_iter().filter(|token| token != "<0x0A>").collect();
        let error = read(&tokens, None).unwrap_err().to_string();
        assert!(error.contains("0x0a"), "{error}");
    }
}
