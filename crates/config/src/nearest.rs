//! The nearest valid name to one that was mistyped.

/// Candidate with the smallest edit distance if it is close enough to be meant, else the one that begins alike
/// (`max_queue_delay_us`). Case does not count.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str> + Clone,
) -> Option<&'a str> {
    // Longer words cannot be a slip of any name we know, and the distance is quadratic.
    const MAX_LENGTH: usize = 64;
    if word.is_empty() || word.len() > MAX_LENGTH {
        return None;
    }
    let wanted = fold(word);
    let allowed = (wanted.len() / 3).max(1);
    let scored = candidates.clone().into_iter().map(|name| (distance(&wanted, &fold(name)), name));
    let (best, name) = scored.min_by_key(|(score, _)| *score)?;
    if best <= allowed {
        return Some(name);
    }
    let shared = |name: &str| wanted.iter().zip(fold(name)).take_while(|(a, b)| **a == *b).count();
    let (alike, name) = candidates.into_iter().map(|name| (shared(name), name)).max_by_key(|(n, _)| *n)?;
    (alike >= 4 && alike * 3 >= wanted.len() * 2).then_some(name)
}

/// Letters and digits in lower case: `maxBatchSize`, `max-batch-size` and `max_batch_size` are the same word.
fn fold(word: &str) -> Vec<char> {
    word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Edits (insert, delete, replace, swap of neighbours) between two words.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (i, &x) in a.iter().enumerate() {
        let mut row = Vec::with_capacity(b.len() + 1);
        row.push(i + 1);
        for (j, &y) in b.iter().enumerate() {
            let at = |r: &[usize], k: usize| r.get(k).copied().unwrap_or(usize::MAX / 2);
            let replace = at(&above, j) + usize::from(x != y);
            let mut best = replace.min(at(&above, j + 1) + 1).min(at(&row, j) + 1);
            let swapped = i > 0 && j > 0 && a.get(i - 1) == Some(&y) && b.get(j - 1) == Some(&x);
            if swapped {
                best = best.min(at(&before, j - 1) + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut above, row);
    }
    above.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    const NAMES: [&str; 4] = ["max_batch_size", "max_queue_delay_microseconds", "input", "name"];

    #[test]
    fn finds_slips() {
        assert_eq!(nearest("max_batchsize", NAMES), Some("max_batch_size"));
        assert_eq!(nearest("maxBatchSize", NAMES), Some("max_batch_size"));
        assert_eq!(nearest("inptu", NAMES), Some("input"));
        assert_eq!(nearest("nmae", NAMES), Some("name"));
        assert_eq!(nearest("max_queue_delay_us", NAMES), Some("max_queue_delay_microseconds"));
    }

    #[test]
    fn refuses_strangers() {
        assert_eq!(nearest("zebra", NAMES), None);
        assert_eq!(nearest("", NAMES), None);
        assert_eq!(nearest(&"x".repeat(10_000), NAMES), None);
    }
}
