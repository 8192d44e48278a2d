//! The header of an .npy file: a Python dictionary with the element type, the order of the axes and the shape.
//!
//! Source: `numpy.lib.format`, format versions 1.0, 2.0 and 3.0.

use anyhow::{Result, bail, ensure};

/// Axes that an array may have; numpy's own limit is 64.
const MAX_AXES: usize = 64;

/// What the dictionary says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    /// Element type, as `<f4`.
    pub(super) descr: String,
    pub(super) fortran_order: bool,
    pub(super) shape: Vec<i64>,
}

impl Header {
    /// Reads the dictionary.
    ///
    /// # Errors
    /// It is not one, lacks a member, or describes records instead of plain elements.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        let mut reader = Reader(text);
        reader.expect('{')?;
        while !reader.take('}') {
            let key = reader.string()?;
            reader.expect(':')?;
            match key.as_str() {
                "descr" => descr = Some(reader.descr()?),
                "fortran_order" => fortran_order = Some(reader.boolean()?),
                "shape" => shape = Some(reader.shape()?),
                other => bail!("its header has an unknown member '{other}'"),
            }
            if !reader.take(',') {
                reader.expect('}')?;
                break;
            }
        }
        match (descr, fortran_order, shape) {
            (Some(descr), Some(fortran_order), Some(shape)) => Ok(Self { descr, fortran_order, shape }),
            _ => bail!("its header lacks one of 'descr', 'fortran_order' and 'shape'"),
        }
    }

    /// The dictionary as numpy writes it, without padding.
    pub(super) fn print(&self) -> String {
        let order = if self.fortran_order { "True" } else { "False" };
        let shape = match self.shape.as_slice() {
            [one] => format!("({one},)"),
            axes => format!("({})", axes.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
        };
        format!("{{'descr': '{}', 'fortran_order': {order}, 'shape': {shape}, }}", self.descr)
    }
}

/// What is left of the dictionary's text.
struct Reader<'a>(&'a str);

impl Reader<'_> {
    fn take(&mut self, mark: char) -> bool {
        let rest = self.0.trim_start();
        match rest.strip_prefix(mark) {
            Some(after) => {
                self.0 = after;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, mark: char) -> Result<()> {
        if self.take(mark) {
            return Ok(());
        }
        let found: String = self.0.trim_start().chars().take(20).collect();
        bail!("its header is damaged: expected '{mark}', found '{found}'")
    }

    fn string(&mut self) -> Result<String> {
        let quote = if self.take('"') { '"' } else { '\'' };
        if quote == '\'' {
            self.expect(quote)?;
        }
        let Some((text, after)) = self.0.split_once(quote) else {
            bail!("its header is damaged: a quotation mark is never closed")
        };
        self.0 = after;
        Ok(text.to_owned())
    }

    fn descr(&mut self) -> Result<String> {
        if self.take('[') {
            bail!("it holds records with named fields; save each field as an array of its own");
        }
        self.string()
    }

    /// The next word: letters and digits.
    fn word(&mut self) -> &str {
        let rest = self.0.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        self.0 = after;
        word
    }

    fn boolean(&mut self) -> Result<bool> {
        match self.word() {
            "True" => Ok(true),
            "False" => Ok(false),
            other => bail!("its header is damaged: expected True or False, found '{other}'"),
        }
    }

    fn shape(&mut self) -> Result<Vec<i64>> {
        self.expect('(')?;
        let mut shape = Vec::new();
        while !self.take(')') {
            // Python 2 wrote long integers with an L behind them.
            let word = self.word();
            match word.strip_suffix('L').unwrap_or(word).parse() {
                Ok(axis) => shape.push(axis),
                Err(_) => bail!("its header is damaged: expected the length of an axis, found '{word}'"),
            }
            ensure!(shape.len() <= MAX_AXES, "it has more than {MAX_AXES} axes");
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_prints_and_what_others_print() {
        for shape in [vec![], vec![3], vec![2, 3, 4], vec![0]] {
            let header = Header { descr: "<f4".to_owned(), fortran_order: false, shape };
            assert_eq!(Header::parse(&header.print()).expect("its own text"), header);
        }
        let wanted = Header { descr: "|u1".to_owned(), fortran_order: true, shape: vec![2, 1] };
        for text in [
            "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 1), }   \n",
            "{\"shape\":(2L,1L),\"descr\":\"|u1\",\"fortran_order\":True}",
        ] {
            assert_eq!(Header::parse(text).expect(text), wanted);
        }
    }

    #[test]
    fn refuses_what_is_none() {
        for (text, reason) in [
            ("", "expected '{'"),
            ("{'descr': '<f4'", "expected '}'"),
            ("{'descr': '<f4}", "never closed"),
            ("{'descr': '<f4', 'shape': (1,)}", "lacks one of"),
            ("{'descr': [('a', '<f4')], ", "records"),
            ("{'descr': '<f4', 'fortran_order': 1, ", "True or False"),
            ("{'shape': (1, x)}", "length of an axis"),
            ("{'shape': (99999999999999999999,)}", "length of an axis"),
            ("{'shape': (-1,)}", "length of an axis"),
            ("{'order': 'C'}", "unknown member 'order'"),
        ] {
            let error = Header::parse(text).expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
        let many = format!("{{'shape': ({})}}", "1, ".repeat(70));
        assert!(Header::parse(&many).expect_err("too many").to_string().contains("more than 64 axes"));
    }
}
