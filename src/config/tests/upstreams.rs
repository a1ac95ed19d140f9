//! `upstreams` and `aliases`.

use super::*;

#[test]
fn upstreams_are_urls_or_tables_and_printed_as_tables() {
    let load_file = |text: &str| {
        let file = file(text);
        load(&Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] })
    };
    let of_url = load_file("upstreams = ['http://10.0.0.1:8000']\n").unwrap().0.upstreams;
    assert_eq!(of_url, [Upstream::new("http://10.0.0.1:8000".parse().unwrap())]);
    for url in ["http://10.0.0.1:8000/a", "http://ann:secret@10.0.0.1:8000/a", "http://ann@10.0.0.1:8000/a"] {
        assert_eq!(Upstream::new(url.parse().unwrap()).shown_url(), "http://10.0.0.1:8000/a");
    }
    let table = "[[upstreams]]\nurl = 'http://10.0.0.1:8000'\nresolve = 'one'\ncache_salt = 'on'\nhttp = 'h2c'\n\
        kv_events = 'tcp://*:5557'\nkv_events_replay = 'tcp://10.0.0.9:5558'\nblock_size = 32\nrole = 'pooling'\n\
        max_requests = 100\ncontinue_streams = true\n";
    let (config, origins) = load_file(table).unwrap();
    let endpoint = |text: &str| text.parse().unwrap();
    let sockets = |live: &str, replay: &str| KvSockets { live: endpoint(live), replay: Some(endpoint(replay)) };
    let kv_events = KvEvents::At(vec![sockets("tcp://10.0.0.1:5557", "tcp://10.0.0.9:5558")]);
    let expected = Upstream {
        resolve: Resolve::One,
        cache_salt: CacheSalt::On,
        http: HttpVersion::H2c,
        kv_events,
        block_size: NonZero::new(32),
        max_requests: NonZero::new(100),
        continue_streams: true,
        role: UpstreamRole::Pooling,
        ..of_url[0].clone()
    };
    assert_eq!(config.upstreams, [expected]);
    assert_eq!(load_file(&as_toml(&config, &origins)).unwrap().0.upstreams, config.upstreams);
    let (config, origins) = load_file("[[upstreams]]\nurl = 'https://a'\nca_file = '/srv/ca.pem'\n").unwrap();
    assert_eq!(config.upstreams[0].ca_file, Some("/srv/ca.pem".into()));
    assert_eq!(load_file(&as_toml(&config, &origins)).unwrap().0.upstreams, config.upstreams);
    let auto = load_file("[[upstreams]]\nurl = 'http://a'\nkv_events = 'auto'\n").unwrap().0;
    assert_eq!(auto.upstreams[0].kv_events, KvEvents::Auto);
    let (config, origins) = load_file("upstreams = ['http://a']\n[tokenizers]\n'org/m.1' = '/srv/m'\n").unwrap();
    assert_eq!(config.tokenizers, BTreeMap::from([("org/m.1".to_owned(), "/srv/m".into())]));
    assert_eq!(load_file(&as_toml(&config, &origins)).unwrap().0.tokenizers, config.tokenizers);
    for (wrong, named) in [
        ("kv_events = 'ipc:///tmp/kv'", "kv_events: endpoint \"ipc:///tmp/kv\""),
        ("kv_events_replay = 'tcp://*:5558'", "kv_events_replay needs"),
        ("kv_events = 5557", "or a list of one for each data-parallel rank"),
        ("kv_events = []", "kv_events: an empty list"),
        ("kv_events = ['tcp://*:1', 'auto']", "kv_events: endpoint \"auto\""),
        (
            "kv_events = ['tcp://*:1', 'tcp://*:2']\nkv_events_replay = 'tcp://*:3'",
            "as many addresses as in kv_events, 2",
        ),
        ("block_size = 0", "block_size"),
        ("max_requests = 0", "max_requests"),
        ("role = 'decode'", "role: `decode` is not supported yet: KV blocks are not handed over between servers"),
        ("role = 'embed'", "role: `embed`; expected `auto`, `both`, `generate` or `pooling`"),
        ("[[upstreams]]\nurl = 'http://a'", "upstreams.1.url"),
        ("[[upstreams]]\nurl = 'https://b'\nhttp = 'h2c'", "HTTP/2 without TLS"),
        ("ca_file = 'ca.pem'", "ca_file: only a server with https://"),
    ] {
        let error = load_file(&format!("[[upstreams]]\nurl = 'http://a'\n{wrong}\n")).err().unwrap();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn a_url_has_no_part_that_would_be_ignored() {
    let load_url = |url: &str| {
        let file = file(&format!("upstreams = ['{url}']\n"));
        load(&Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] }).map(|_| ())
    };
    for url in ["http://a", "http://a:1/", "https://a:65535/b/", "http://[::1]", "http://[::1]:8000/b"] {
        assert_eq!(load_url(url), Ok(()), "{url}");
    }
    for (url, problem) in [
        ("http://a:65536", "the port is not"),
        ("http://a:80000/b", "the port is not"),
        ("http://a:0", "the port is not"),
        ("http://a:", "the port is not"),
        ("http://[::1]:99999", "the port is not"),
        ("http://ann:secret@a:8000", "api_key_file"),
        ("http://ann@a", "api_key_file"),
        ("http://a:8000/?tenant=b", "a query"),
        ("http://a:8000/b#c", "a fragment"),
    ] {
        let error = load_url(url).unwrap_err();
        assert!(error.contains("upstreams.0") && error.contains(problem), "{url}: {error}");
        assert!(!error.contains("secret"), "{url}: {error}");
    }
}

#[test]
fn a_server_is_listed_once_however_its_url_is_written() {
    let load_urls = |urls: [&str; 2]| {
        let file = file(&format!("upstreams = {urls:?}\n"));
        load(&Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] }).map(|_| ())
    };
    for urls in [["http://a", "HTTP://A:80/"], ["https://a/b", "https://a:443/b/"], ["http://a:1", "http://a:1//"]] {
        let error = load_urls(urls).unwrap_err();
        assert!(error.contains("upstreams.1.url") && error.contains("is upstreams.0 already"), "{urls:?}: {error}");
    }
    for urls in [["http://a", "https://a"], ["http://a", "http://a/b"], ["http://a:1", "http://a:2"]] {
        assert_eq!(load_urls(urls), Ok(()), "{urls:?}");
    }
}

#[test]
fn the_publishers_of_ranks_are_a_list_and_requests_name_the_rank() {
    let load_file = |text: &str| {
        let file = file(text);
        load(&Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] }).unwrap()
    };
    let table = "[[upstreams]]\nurl = 'http://vllm:8000'\nkv_events = ['tcp://*:5557', 'tcp://10.0.0.2:5557']\n";
    let replay = "kv_events_replay = ['tcp://*:5657', 'tcp://10.0.0.2:5657']\n";
    for text in [table.to_owned(), format!("{table}{replay}")] {
        let (config, origins) = load_file(&text);
        let kv_events = &config.upstreams[0].kv_events;
        let sources = kv_events.sources(Vec::new(), "vllm", "10.0.0.1");
        let live: Vec<String> = sources.iter().map(|source| source.live.to_string()).collect();
        assert_eq!(live, ["tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557"], "the first at the address of its name");
        assert!(sources.iter().all(|source| source.replay.is_some() == text.contains("replay")));
        assert_eq!(kv_events.ranks(Vec::new()), [0, 1]);
        assert_eq!(load_file(&as_toml(&config, &origins)).0.upstreams, config.upstreams);
    }
    let one = load_file("[[upstreams]]\nurl = 'http://a'\nkv_events = ['tcp://*:5557']\n").0;
    assert_eq!(one.upstreams[0].kv_events.ranks(vec![0, 1]), [0; 0], "one publisher is that of the server");
    assert_eq!(KvEvents::Auto.ranks(vec![2, 3]), [2, 3]);
}

#[test]
fn an_alias_is_a_name_or_a_list_of_deployments() {
    let load_file = |text: &str| {
        let file = file(&format!("upstreams = ['http://a']\n[aliases]\n{text}\n"));
        let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
        let loaded = load(&sources)?;
        Ok::<_, String>((loaded.0.aliases.clone(), as_toml(&loaded.0, &loaded.1)))
    };
    let deployment = |model: &str, weight| Deployment { model: model.into(), weight };
    let (aliases, printed) =
        load_file("'gpt-4.1' = 'org/m'\nchat = [{ model = 'a', weight = 9 }, { model = 'b' }]").unwrap();
    assert_eq!(aliases["gpt-4.1"].deployments, [deployment("org/m", 1)]);
    assert_eq!(aliases["chat"].deployments, [deployment("a", 9), deployment("b", 1)]);
    let again = file(&printed);
    let again = Sources { file: Some(again.path().into()), environment: environment(&[]), flags: vec![] };
    assert_eq!(load(&again).unwrap().0.aliases, aliases);
    for wrong in ["chat = []", "chat = [{ model = 'a', weight = 0 }]", "chat = ''", "chat = [{ name = 'a' }]"] {
        let error = load_file(wrong).unwrap_err();
        assert!(error.contains("aliases.chat"), "{wrong}: {error}");
    }
}

#[test]
fn a_key_is_the_text_of_its_file() {
    let key = |text: &str| {
        let file = file(text);
        let upstream =
            Upstream { api_key_file: Some(file.path().into()), ..Upstream::new("http://a:1".parse().unwrap()) };
        upstream.api_key()
    };
    for text in ["sk-1\n", "\u{feff}sk-1\r\n", "Bearer sk-1", "Bearer  sk-1 \n"] {
        assert_eq!(key(text).unwrap().as_deref(), Some("sk-1"), "{text:?}");
    }
    for text in ["", " \n", "\u{feff}"] {
        assert!(key(text).is_err(), "{text:?}");
    }
}
