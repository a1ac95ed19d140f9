//! Which position in somebody's array each name has: a hash table made of lines of the cache.
//!
//! A name belongs to a line of eight, and stands in the first one from there on that has room: in the first, nearly always.
//! So a look-up waits for one line here and for the place in the array that it names, which bears the whole name, and
//! [`Ahead`] begins both long before their turn.

use super::tag;
use crate::block::SequenceHash;
use crate::table::hugepages;

/// Names in a line.
const WAYS: usize = 8;
/// Words in a line: the names' tags, then their positions plus one, where 0 is empty.
const LINE: usize = 2 * WAYS;

/// Which position in somebody's array each name has. The names themselves stand in the array.
#[derive(Default)]
pub(crate) struct Positions {
    words: Vec<u32>,
    /// Where the first line begins, as the cache has them.
    start: usize,
    /// A power of two, or none.
    lines: usize,
    len: usize,
}

/// What was begun of look-ups of many names, one after the other: see [`Positions::find_of`].
#[derive(Default)]
pub(crate) struct Ahead([u32; Ahead::LOOKS]);

impl Ahead {
    /// So many look-ups before its turn a look-up begins, for each of the two places that it reads. About as many
    /// misses as a core waits for at once; with twice as many it took half as long again.
    const LOOKS: usize = 16;
}

impl Positions {
    const LEAST: usize = 2;

    /// Room for `names` without growing. The memory is reserved, and touched only as names come.
    pub(crate) fn with_capacity(names: usize) -> Self {
        Self::empty((names * 2).div_ceil(WAYS).next_power_of_two().max(Self::LEAST))
    }

    fn empty(lines: usize) -> Self {
        let words = vec![0; lines * LINE + LINE - 1];
        hugepages::enlarge(words.as_slice());
        let start = words.as_ptr().align_offset(LINE * size_of::<u32>()).min(LINE - 1);
        Self { words, start, lines, len: 0 }
    }

    /// How many names have a position.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where a name is. `at` says whether a position holds it: tags are short, and two names may share one.
    pub(crate) fn find(&self, name: &SequenceHash, at: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = tag(name);
        let mut line = self.home(tag);
        loop {
            let (tags, places) = self.line(line)?;
            for (known, place) in tags.iter().zip(places) {
                if *known == tag
                    && let Some(position) = place.checked_sub(1)
                    && at(position)
                {
                    return Some(position);
                }
            }
            if places.contains(&0) {
                return None;
            }
            line = self.after(line);
        }
    }

    /// Where one of many names is that are looked up one after the other, from the first: begins the look-ups that follow.
    /// `place` is what stands at a position and bears a name, which `named` compares. Between two look-ups anything may
    /// change.
    pub(crate) fn find_of<'a, T: 'a>(
        &self,
        ahead: &mut Ahead,
        names: &[SequenceHash],
        at: usize,
        place: impl Fn(u32) -> Option<&'a T>,
        named: impl Fn(&T, &SequenceHash) -> bool,
    ) -> Option<u32> {
        const LOOKS: usize = Ahead::LOOKS;
        let mut begin = |near: usize| {
            let guess = names.get(near).map_or(0, |name| self.guess(name));
            if let Some(place) = guess.checked_sub(1).and_then(&place) {
                hugepages::fetch_mut(place);
            }
            std::mem::replace(&mut ahead.0[near % LOOKS], guess)
        };
        if at == 0 {
            names.iter().take(2 * LOOKS).for_each(|name| self.fetch(name));
            (0..LOOKS).for_each(|near| _ = begin(near));
        }
        if let Some(far) = names.get(at + 2 * LOOKS) {
            self.fetch(far);
        }
        let (name, guess) = (&names[at], begin(at + LOOKS).checked_sub(1));
        let is = |position: &u32| place(*position).is_some_and(|place| named(place, name));
        guess.filter(&is).or_else(|| self.find(name, |position| is(&position)))
    }

    /// One more than where a name probably is: good enough to look there first, and to be checked there. Never branches on
    /// what it reads, since a wrong turn costs as much as a look.
    fn guess(&self, name: &SequenceHash) -> u32 {
        let tag = tag(name);
        let Some((tags, places)) = self.line(self.home(tag)) else { return 0 };
        let alike = u64::from_le_bytes(tags.map(|known| u8::from(known == tag)));
        places[alike.trailing_zeros() as usize / 8 % WAYS]
    }

    /// Begins to bring what a look-up, an insertion or a removal of the name reads first.
    pub(crate) fn fetch(&self, name: &SequenceHash) {
        if let Some(line) = self.words.get(self.start + self.home(tag(name)) * LINE) {
            hugepages::fetch(line);
        }
    }

    /// Adds a name that is not here.
    pub(crate) fn insert(&mut self, name: &SequenceHash, position: u32) {
        if self.lines * WAYS < (self.len + 1) * 2 {
            self.grow();
        }
        self.put(tag(name), position + 1);
    }

    /// Removes a name from a position that holds it.
    pub(crate) fn remove(&mut self, name: &SequenceHash, position: u32) {
        let (mut line, mut way) = self.spot_of(name, position);
        self.len -= 1;
        loop {
            let was_full = self.line(line).is_some_and(|(_, places)| !places.contains(&0));
            self.set(line, way, 0, 0);
            if !was_full {
                return;
            }
            // One that had to go past this line comes back, and leaves a hole of its own.
            let Some((far, its, tag, place)) = self.stray(line) else { return };
            self.set(line, way, tag, place);
            (line, way) = (far, its);
        }
    }

    /// The next name behind a line that would stand in it, or before it, if there had been room.
    fn stray(&self, line: usize) -> Option<(usize, usize, u32, u32)> {
        let mut far = self.after(line);
        while far != line {
            let (tags, places) = self.line(far)?;
            let past = |way: &usize| {
                places[*way] != 0 && self.distance(self.home(tags[*way]), far) >= self.distance(line, far)
            };
            if let Some(way) = (0..WAYS).find(past) {
                return Some((far, way, tags[way], places[way]));
            }
            if places.contains(&0) {
                return None;
            }
            far = self.after(far);
        }
        None
    }

    /// A name moves.
    pub(super) fn relocate(&mut self, name: &SequenceHash, from: u32, to: u32) {
        let (line, way) = self.spot_of(name, from);
        self.set(line, way, tag(name), to + 1);
    }

    /// The line and the way of a name that has a position.
    fn spot_of(&self, name: &SequenceHash, position: u32) -> (usize, usize) {
        let mut line = self.home(tag(name));
        loop {
            let (_, places) = self.line(line).expect("a hash that has a position has a line");
            if let Some(way) = places.iter().position(|place| *place == position + 1) {
                return (line, way);
            }
            assert!(!places.contains(&0), "{name} is not at {position}");
            line = self.after(line);
        }
    }

    fn put(&mut self, tag: u32, place: u32) {
        let mut line = self.home(tag);
        let way = loop {
            let (_, places) = self.line(line).expect("there is room for one more");
            match places.iter().position(|place| *place == 0) {
                Some(way) => break way,
                None => line = self.after(line),
            }
        };
        self.set(line, way, tag, place);
        self.len += 1;
    }

    fn grow(&mut self) {
        let smaller = std::mem::replace(self, Self::empty((self.lines * 2).max(Self::LEAST)));
        for (tags, places) in (0..smaller.lines).filter_map(|line| smaller.line(line)) {
            for (tag, place) in tags.iter().zip(places).filter(|(_, place)| **place != 0) {
                self.put(*tag, *place);
            }
        }
    }

    fn line(&self, line: usize) -> Option<(&[u32; WAYS], &[u32; WAYS])> {
        let line: &[u32; LINE] = self.words.get(self.start + line * LINE..)?.first_chunk()?;
        line.first_chunk().zip(line.last_chunk())
    }

    fn set(&mut self, line: usize, way: usize, tag: u32, place: u32) {
        let at = self.start + line * LINE + way;
        self.words[at] = tag;
        self.words[at + WAYS] = place;
    }

    fn home(&self, tag: u32) -> usize {
        tag as usize & self.lines.wrapping_sub(1)
    }

    fn after(&self, line: usize) -> usize {
        (line + 1) & (self.lines - 1)
    }

    /// Lines to go.
    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.lines - 1)
    }
}
