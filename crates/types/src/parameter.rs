//! Named scalar values that travel with requests and responses (the KServe "parameters" object).

/// Value of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum ParameterValue {
    Bool(bool),
    Int(i64),
    /// A number above `i64::MAX`; the HTTP protocol can carry it, gRPC has an own field for it.
    Uint(u64),
    Double(f64),
    String(String),
}

/// Parameters in the order they came. Few in practice, so looking one up is a walk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters(Vec<(String, ParameterValue)>);

impl Parameters {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn get(&self, name: &str) -> Option<&ParameterValue> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// Adds a parameter; a later one of the same name replaces the earlier.
    pub fn insert(&mut self, name: impl Into<String>, value: ParameterValue) {
        let name = name.into();
        match self.0.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name, value)),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &ParameterValue)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }
}
