//! An alias as text: the name of a model, or a list of deployments.

use super::{Alias, Deployment};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use std::fmt;

impl Alias {
    fn of(deployments: Vec<Deployment>) -> Result<Self, &'static str> {
        if deployments.iter().any(|deployment| deployment.model.is_empty()) {
            return Err("a deployment has the name of a model in `model`");
        }
        if deployments.iter().all(|deployment| deployment.weight == 0) {
            return Err("at least one deployment has a weight above 0");
        }
        Ok(Self { deployments })
    }
}

impl<'de> Deserialize<'de> for Alias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = Alias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a model, or a list of tables with `model` and `weight`")
            }

            fn visit_str<E: de::Error>(self, model: &str) -> Result<Alias, E> {
                Alias::of(vec![Deployment { model: model.to_owned(), weight: 1 }]).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Alias, A::Error> {
                Alias::of(Vec::deserialize(SeqAccessDeserializer::new(list))?).map_err(de::Error::custom)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

impl Serialize for Alias {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.deployments.serialize(serializer)
    }
}
