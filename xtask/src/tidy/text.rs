//! Rules for every text file: no machine's own paths, no chores left without an issue.

use super::Complaint;

/// The folder where the project is built on one particular machine; in pieces, or this file would break
/// its own rule.
const MACHINE_FOLDER: &str = concat!("/wo", "rk/");

/// Words that announce something left to do; in pieces for the same reason.
const LEFT_TO_DO: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

pub(super) fn check(path: &str, content: &str) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (number, line) in (1..).zip(content.lines()) {
        if starts_path(line, MACHINE_FOLDER) {
            complaints.push(Complaint::at(
                path,
                number,
                format!(
                    "names the folder {MACHINE_FOLDER} of one machine; use a relative path or an argument"
                ),
            ));
        }
        if let Some(word) = LEFT_TO_DO.into_iter().find(|word| lacks_issue(line, word)) {
            complaints.push(Complaint::at(
                path,
                number,
                format!("{word} without an issue; write {word}(#123) or do it"),
            ));
        }
    }
    complaints
}

/// Whether `folder` occurs in `line` as the beginning of an absolute path and not inside a longer one.
fn starts_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(idx, _)| {
        let before = line.get(..idx).and_then(|head| head.chars().next_back());
        !before.is_some_and(|before| before.is_alphanumeric() || "._-~/}".contains(before))
    })
}

/// Whether `line` holds `word` as a word of its own that is not followed by `(#<number>)`.
fn lacks_issue(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(idx, _)| {
        let in_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        let before = line.get(..idx).and_then(|head| head.chars().next_back());
        let after = line.get(idx + word.len()..).unwrap_or_default();
        if before.is_some_and(in_word) || after.starts_with(in_word) {
            return false;
        }
        let issue = after.strip_prefix("(#").and_then(|rest| rest.split_once(')')).map(|(number, _)| number);
        !issue.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(content: &str) -> Vec<usize> {
        check("a.txt", content).iter().filter_map(|complaint| complaint.line).collect()
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        let folder = MACHINE_FOLDER;
        let bad = format!("cd {folder}main\nx = \"{folder}shared\"\n{folder}\nfile://{folder}a");
        assert_eq!(lines_of(&bad), [1, 2, 3]);
        let fine =
            format!("/frame{folder}x\nhttps://host{folder}x\n${{HOME}}{folder}x\n/workspace/x\n..{folder}");
        assert_eq!(lines_of(&fine), [] as [usize; 0]);
    }

    #[test]
    fn chores_need_an_issue() {
        for word in LEFT_TO_DO {
            let bad = format!("// {word}: later\n{word}(me)\n{word}(#)\n{word}(#12x)\n{word}");
            assert_eq!(lines_of(&bad), [1, 2, 3, 4, 5], "{word}");
            let fine = format!("// {word}(#12): when it is known\nMY_{word}S\nTHE{word}");
            assert_eq!(lines_of(&fine), [] as [usize; 0], "{word}");
        }
    }
}
