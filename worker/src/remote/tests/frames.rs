//! How the outputs of a request are divided into frames.

use super::*;
use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

#[tokio::test]
async fn the_outputs_of_a_step_are_one_frame() {
    let (sender, receiver) = mpsc::unbounded_channel();
    let outputs = stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
    let outputs = Mutex::new(Some(outputs.boxed()));
    let pair = Pair::open(Arc::new(Streams(move || outputs.lock().take().expect("one request")))).await;
    let request = wire::encode_request(&request(&pair.remote, &[1], 9), Instant::now()).unwrap();
    let headers = with_protocol(&PROTOCOL.to_string());
    let mut body = pair.server.respond("7", &headers, Full::new(request)).await.into_body();
    let mut next_id = 0;
    for count in [1, 5, 3] {
        // A step of the engine.
        let ids: Vec<u32> = (next_id..next_id + count).collect();
        for id in &ids {
            sender.send(Ok(Output::Tokens(Tokens { ids: vec![*id], ..Tokens::default() }))).unwrap();
        }
        next_id += count;
        let mut frame = BytesMut::from(&*body.frame().await.unwrap().unwrap().into_data().unwrap());
        let mut arrived = Vec::new();
        while let Some(output) = wire::decode_output(&mut frame).unwrap() {
            let Ok(Output::Tokens(tokens)) = output else { panic!("{output:?}") };
            arrived.extend(tokens.ids);
        }
        assert_eq!(arrived, ids);
        assert!(body.frame().now_or_never().is_none(), "nothing is left for another frame");
    }
    drop(sender);
    assert!(body.frame().await.is_none(), "no empty frame at the end");
}
