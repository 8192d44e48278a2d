//! Entries in the order of their last use, with a limit on their bytes.
//!
//! Entries lie in a dense vector and are linked by their places in it; the last one moves into the place of one that
//! is removed. Invariant: `bytes` is the sum over the entries and at most `limit`, and what the vector and the map
//! take is at most what the entries count for it ([`Recent::OVERHEAD`]) and a constant.

use std::collections::HashMap;

use super::super::answer::ALLOCATION;
use super::super::key::Key;

/// No place: the end of the list.
const NONE: usize = usize::MAX;
/// The vector is not made smaller below this number of places.
const FEW: usize = 16;

/// A value, the bytes it counts for, and whose it is.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) value: T,
    pub(super) bytes: usize,
    pub(super) owner: u64,
}

#[derive(Debug)]
struct Node<T> {
    key: Key,
    entry: Entry<T>,
    newer: usize,
    older: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Recent<T> {
    limit: usize,
    bytes: usize,
    places: HashMap<Key, usize>,
    nodes: Vec<Node<T>>,
    newest: usize,
    oldest: usize,
}

impl<T> Recent<T> {
    /// Bytes of bookkeeping for one entry: its node in a vector that is at least half full, and its slot in a map
    /// that is at least a quarter full, keeps an eighth free and has a byte of its own for each slot.
    pub(super) const OVERHEAD: usize =
        2 * size_of::<Node<T>>() + 4 * (size_of::<(Key, usize)>() + 1) * 8 / 7 + ALLOCATION;

    pub(super) fn new(limit: usize) -> Self {
        Self { limit, bytes: 0, places: HashMap::new(), nodes: Vec::new(), newest: NONE, oldest: NONE }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The value of a key, which is now the one used last.
    pub(super) fn get(&mut self, key: &Key) -> Option<&T> {
        let place = *self.places.get(key)?;
        if place != self.newest {
            self.unlink(place);
            self.link_newest(place);
        }
        self.nodes.get(place).map(|node| &node.entry.value)
    }

    /// Removes values, those not used for longest first, until there is room for `bytes`, but at most `limit` of them.
    /// Returns them, and whether there is room now.
    pub(super) fn make_room(&mut self, bytes: usize, limit: usize) -> (Vec<T>, bool) {
        let mut evicted = Vec::new();
        while !self.has_room(bytes) && evicted.len() < limit {
            let Some(value) = self.remove(self.oldest) else { break };
            evicted.push(value);
        }
        (evicted, self.has_room(bytes))
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.bytes.checked_add(bytes).is_some_and(|sum| sum <= self.limit)
    }

    /// Takes in a value for which there is room; otherwise gives it back. If its key is there already, that one counts
    /// as used and the new one is given back.
    pub(super) fn put(&mut self, key: Key, entry: Entry<T>) -> Option<T> {
        if !self.has_room(entry.bytes) || self.get(&key).is_some() {
            return Some(entry.value);
        }
        self.bytes += entry.bytes;
        let place = self.nodes.len();
        if place == self.nodes.capacity() {
            self.nodes.reserve_exact((place / 2).max(FEW));
        }
        self.nodes.push(Node { key, entry, newer: NONE, older: NONE });
        self.places.insert(key, place);
        self.link_newest(place);
        self.give_back();
        None
    }

    /// Removes what one owner has in at most `limit` places, from `end` downwards; `None` is the end of all. Returns the
    /// values and where to go on, `None` when nothing is left. What others do in between makes it miss nothing: values
    /// move to lower places only.
    pub(super) fn remove_owner(
        &mut self,
        owner: u64,
        end: Option<usize>,
        limit: usize,
    ) -> (Vec<T>, Option<usize>) {
        let end = end.unwrap_or(usize::MAX).min(self.nodes.len());
        let begin = end.saturating_sub(limit.max(1));
        let mut removed = Vec::new();
        // From the end, so that what moves into a free place has been looked at.
        for place in (begin..end).rev() {
            if self.nodes.get(place).is_some_and(|node| node.entry.owner == owner) {
                removed.extend(self.remove(place));
            }
        }
        self.give_back();
        (removed, (begin > 0).then_some(begin))
    }

    fn remove(&mut self, place: usize) -> Option<T> {
        if place >= self.nodes.len() {
            return None;
        }
        self.unlink(place);
        let node = self.nodes.swap_remove(place);
        self.places.remove(&node.key);
        self.bytes -= node.entry.bytes;
        if let Some(moved) = self.nodes.get(place) {
            let (newer, older) = (moved.newer, moved.older);
            self.places.insert(moved.key, place);
            self.link(newer, place);
            self.link(place, older);
        }
        Some(node.entry.value)
    }

    /// Gives memory back after many small entries made room for few large ones.
    fn give_back(&mut self) {
        let len = self.nodes.len();
        if self.nodes.capacity() > (2 * len).max(FEW) {
            self.nodes.shrink_to((len + len / 2).max(FEW));
        }
        if self.places.capacity() > (4 * len).max(FEW) {
            self.places.shrink_to(len);
        }
    }

    /// Makes two places neighbours; [`NONE`] is the end on either side.
    fn link(&mut self, newer: usize, older: usize) {
        match self.nodes.get_mut(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn unlink(&mut self, place: usize) {
        let Some(node) = self.nodes.get(place) else { return };
        self.link(node.newer, node.older);
    }

    fn link_newest(&mut self, place: usize) {
        self.link(place, self.newest);
        self.link(NONE, place);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(number: u8) -> Key {
        let mut bytes = [7; 32];
        bytes[31] = number;
        Key::from_bytes(bytes)
    }

    #[derive(Clone, Debug)]
    enum Step {
        Get(u8),
        Put(u8, usize, u64),
        RemoveOwner(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0_u8..12).prop_map(Step::Get),
            6 => (0_u8..12, 0_usize..60, 0_u64..3).prop_map(|(key, bytes, owner)| Step::Put(key, bytes, owner)),
            1 => (0_u64..3).prop_map(Step::RemoveOwner),
        ]
    }

    proptest! {
        /// Behaves as a plain list from the newest to the oldest, whatever is done with it.
        #[test]
        fn keeps_the_limit_and_the_order(
            steps in proptest::collection::vec(step(), 1..120), chunk in 1_usize..5,
        ) {
            const LIMIT: usize = 100;
            let mut recent = Recent::new(LIMIT);
            let mut list: Vec<(u8, u32, usize, u64)> = Vec::new();
            for (value, step) in (0_u32..).zip(steps) {
                match step {
                    Step::Get(number) => {
                        let place = list.iter().position(|one| one.0 == number);
                        let want = place.map(|place| {
                            let one = list.remove(place);
                            list.insert(0, one);
                            one.1
                        });
                        prop_assert_eq!(recent.get(&key(number)).copied(), want);
                    }
                    Step::Put(number, bytes, owner) => {
                        let mut evicted = Vec::new();
                        loop {
                            let (some, is_enough) = recent.make_room(bytes, chunk);
                            prop_assert!(some.len() <= chunk);
                            evicted.extend(some);
                            if is_enough {
                                break;
                            }
                        }
                        let mut want = Vec::new();
                        while list.iter().map(|one| one.2).sum::<usize>() + bytes > LIMIT {
                            want.extend(list.pop().map(|one| one.1));
                        }
                        prop_assert_eq!(evicted, want);
                        let back = recent.put(key(number), Entry { value, bytes, owner });
                        if let Some(place) = list.iter().position(|one| one.0 == number) {
                            let one = list.remove(place);
                            list.insert(0, one);
                            prop_assert_eq!(back, Some(value));
                        } else {
                            list.insert(0, (number, value, bytes, owner));
                            prop_assert_eq!(back, None);
                        }
                    }
                    Step::RemoveOwner(owner) => {
                        let mut removed = Vec::new();
                        let mut end = None;
                        loop {
                            let (some, next) = recent.remove_owner(owner, end, chunk);
                            removed.extend(some);
                            end = next;
                            if end.is_none() {
                                break;
                            }
                        }
                        removed.sort_unstable();
                        let mut want: Vec<u32> =
                            list.iter().filter(|one| one.3 == owner).map(|one| one.1).collect();
                        want.sort_unstable();
                        list.retain(|one| one.3 != owner);
                        prop_assert_eq!(removed, want);
                    }
                }
                prop_assert!(recent.bytes() <= LIMIT);
                prop_assert_eq!(recent.bytes(), list.iter().map(|one| one.2).sum::<usize>());
                prop_assert_eq!(recent.len(), list.len());
                prop_assert!(recent.nodes.capacity() <= (2 * recent.len()).max(FEW));
                prop_assert!(recent.places.capacity() <= (4 * recent.len()).max(FEW));
            }
        }
    }

    #[test]
    fn memory_shrinks_with_the_number_of_entries() {
        let mut recent = Recent::new(1000);
        for number in 0..250 {
            recent.put(key(number), Entry { value: number, bytes: 4, owner: 0 });
            assert!(recent.nodes.capacity() <= (2 * recent.len()).max(FEW));
        }
        recent.make_room(1000, usize::MAX);
        recent.put(key(255), Entry { value: 255, bytes: 1000, owner: 0 });
        assert_eq!(recent.len(), 1);
        assert!(recent.nodes.capacity() <= FEW && recent.places.capacity() <= FEW);
    }

    #[test]
    fn what_there_is_no_room_for_is_not_taken() {
        let mut recent = Recent::new(10);
        recent.put(key(1), Entry { value: 1, bytes: 4, owner: 0 });
        assert_eq!(recent.put(key(2), Entry { value: 2, bytes: 7, owner: 0 }), Some(2));
        assert_eq!((recent.len(), recent.bytes()), (1, 4));
    }
}
