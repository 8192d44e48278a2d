//! Batch inputs and outputs against a model of them that works on rows one at a time.

use proptest::prelude::*;

use super::*;

const KINDS: [BatchInputKind; 6] = [
    BatchInputKind::ElementCount,
    BatchInputKind::AccumulatedElementCount,
    BatchInputKind::AccumulatedElementCountWithZero,
    BatchInputKind::MaxElementCountAsShape,
    BatchInputKind::ItemShape,
    BatchInputKind::ItemShapeFlatten,
];

fn batch_input(kind: BatchInputKind, data_type: DataType) -> BatchInput {
    BatchInput { kind, targets: vec!["T".into()], data_type, source: "X".into() }
}

fn build(kind: BatchInputKind, shapes: &[&[i64]]) -> (Vec<i64>, Vec<i32>) {
    let (shape, data) = batch_input(kind, DataType::Int32).build(shapes.iter().copied()).unwrap();
    let numbers = data.as_slice().chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
    (shape.to_vec(), numbers.collect())
}

fn output(dims: &[i64], reshape: Option<&[i64]>) -> TensorSpec {
    TensorSpec { reshape: reshape.map(Shape::new), ..TensorSpec::new("Y", DataType::Fp32, Shape::new(dims)) }
}

#[test]
fn the_numbers_are_those_of_the_documentation() {
    // Three requests of shapes [1, 3], [1, 4] and [1, 5], as in Triton's user guide.
    let shapes: [&[i64]; 3] = [&[1, 3], &[1, 4], &[1, 5]];
    assert_eq!(build(BatchInputKind::ElementCount, &shapes), (vec![3], vec![3, 4, 5]));
    assert_eq!(build(BatchInputKind::AccumulatedElementCount, &shapes), (vec![3], vec![3, 7, 12]));
    assert_eq!(build(BatchInputKind::AccumulatedElementCountWithZero, &shapes), (vec![4], vec![0, 3, 7, 12]));
    assert_eq!(build(BatchInputKind::MaxElementCountAsShape, &shapes), (vec![5], vec![0; 5]));
    assert_eq!(build(BatchInputKind::ItemShape, &shapes), (vec![3, 1], vec![3, 4, 5]));
    assert_eq!(build(BatchInputKind::ItemShapeFlatten, &shapes), (vec![3], vec![3, 4, 5]));
}

#[test]
fn rows_of_a_request_count_together_and_have_a_shape_each() {
    // The sentence of the protocol's own comment: batch [[2, 1, 2], [1, 1, 2]] of sizes 2 and 1.
    let shapes: [&[i64]; 2] = [&[2, 1, 2], &[1, 1, 2]];
    assert_eq!(build(BatchInputKind::ElementCount, &shapes), (vec![2], vec![4, 2]));
    assert_eq!(build(BatchInputKind::ItemShape, &shapes), (vec![3, 2], vec![1, 2, 1, 2, 1, 2]));
    assert_eq!(build(BatchInputKind::ItemShapeFlatten, &shapes), (vec![6], vec![1, 2, 1, 2, 1, 2]));
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    let large = 1_i64 << 31;
    for kind in [BatchInputKind::ElementCount, BatchInputKind::ItemShape] {
        let error = batch_input(kind, DataType::Int32).build([&[1, large][..]].into_iter()).unwrap_err();
        assert!(error.message().contains("cannot hold 2147483648"), "{error}");
    }
    let (_, data) = batch_input(BatchInputKind::ElementCount, DataType::Fp32)
        .build([&[1, large][..]].into_iter())
        .unwrap();
    assert_eq!(data.as_slice(), 2_147_483_648_f32.to_le_bytes());
    for kind in [BatchInputKind::AccumulatedElementCount, BatchInputKind::AccumulatedElementCountWithZero] {
        let two: [&[i64]; 2] = [&[i64::MAX], &[1]];
        assert!(batch_input(kind, DataType::Fp32).build(two.into_iter()).is_err(), "{kind:?}");
    }
    for kind in KINDS {
        let beyond = [&[i64::MAX, 2, 2][..]].into_iter();
        assert!(batch_input(kind, DataType::Fp32).build(beyond).is_err(), "{kind:?}");
    }
    let error =
        batch_input(BatchInputKind::ItemShape, DataType::Int32).build([&[][..]].into_iter()).unwrap_err();
    assert!(error.message().contains("no batch dimension"), "{error}");
}

#[test]
fn pieces_take_open_dimensions_from_the_source() {
    let shapes: [&[i64]; 2] = [&[1, 2], &[1, 3]];
    let pieces = scatter(&output(&[-1], None), true, shapes.into_iter(), 5).unwrap();
    assert_eq!(pieces[0], Piece { shape: Shape::new(&[1, 2]), elements: 0..2 });
    assert_eq!(pieces[1], Piece { shape: Shape::new(&[1, 3]), elements: 2..5 });
    let pieces = scatter(&output(&[-1, 4], None), true, shapes.into_iter(), 20).unwrap();
    assert_eq!(pieces[1], Piece { shape: Shape::new(&[1, 3, 4]), elements: 8..20 });
    let pieces = scatter(&output(&[6], Some(&[-1, 2])), true, shapes.into_iter(), 10).unwrap();
    assert_eq!(pieces[1], Piece { shape: Shape::new(&[1, 3, 2]), elements: 4..10 });
    let pieces = scatter(&output(&[-1], None), false, [&[2][..], &[1]].into_iter(), 3).unwrap();
    assert_eq!(pieces[1], Piece { shape: Shape::new(&[1]), elements: 2..3 });
}

#[test]
fn an_output_that_is_too_small_is_told() {
    let shapes: [&[i64]; 2] = [&[1, 2], &[1, 3]];
    let error = scatter(&output(&[-1], None), true, shapes.into_iter(), 4).unwrap_err();
    assert!(error.message().contains("has 4 elements for the whole batch"), "{error}");
    let error = scatter(&output(&[-1, -1], None), true, shapes.into_iter(), 4).unwrap_err();
    assert!(error.message().contains("too few dimensions"), "{error}");
    assert_eq!(scatter(&output(&[-1], None), true, shapes.into_iter(), 9).unwrap()[1].elements, 2..5);
}

/// Shapes of one rank, batch dimension in front, small enough to count by hand.
fn shapes() -> impl Strategy<Value = Vec<Vec<i64>>> {
    (1_usize..4).prop_flat_map(|rank| {
        prop::collection::vec((1_i64..4, prop::collection::vec(0_i64..5, rank)), 1..6).prop_map(|requests| {
            requests.into_iter().map(|(rows, dims)| [vec![rows], dims].concat()).collect()
        })
    })
}

proptest! {
    #[test]
    fn every_kind_counts_what_the_rows_hold(shapes in shapes()) {
        let naive_counts: Vec<i32> = shapes.iter().map(|shape| {
            let mut elements = 0;
            let mut index = vec![0; shape.len()];
            // Walks every index of the tensor.
            while shape.iter().all(|&dim| dim > 0) {
                elements += 1;
                let Some(axis) = (0..shape.len()).rev().find(|&axis| index[axis] + 1 < shape[axis]) else { break };
                index[axis] += 1;
                index[axis + 1..].fill(0);
            }
            elements
        }).collect();
        let rank = shapes[0].len() - 1;
        let mut item_shapes = Vec::new();
        let mut rows = 0;
        for shape in &shapes {
            for _ in 0..shape[0] {
                rows += 1;
                item_shapes.extend(shape[1..].iter().map(|&dim| i32::try_from(dim).unwrap()));
            }
        }
        let sums: Vec<i32> = (1..=naive_counts.len()).map(|n| naive_counts[..n].iter().sum()).collect();
        let with_zero = [vec![0], sums.clone()].concat();
        let max = naive_counts.iter().max().copied().unwrap_or(0);
        let dim = |n: usize| i64::try_from(n).unwrap();
        let expected = [
            (vec![dim(shapes.len())], naive_counts),
            (vec![dim(shapes.len())], sums),
            (vec![dim(shapes.len()) + 1], with_zero),
            (vec![i64::from(max)], vec![0; usize::try_from(max).unwrap()]),
            (vec![rows, dim(rank)], item_shapes.clone()),
            (vec![rows * dim(rank)], item_shapes),
        ];
        let views: Vec<&[i64]> = shapes.iter().map(Vec::as_slice).collect();
        for (kind, expected) in KINDS.into_iter().zip(expected) {
            let made = build(kind, &views);
            prop_assert_eq!(&made, &expected, "{:?}", kind);
            let (shape, data) = batch_input(kind, DataType::Fp32).build(views.iter().copied()).unwrap();
            let floats: Vec<f32> =
                data.as_slice().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
            prop_assert_eq!(shape.to_vec(), expected.0);
            let as_floats: Vec<f32> = expected.1.iter().map(|&n| f32::from(u16::try_from(n).unwrap())).collect();
            prop_assert_eq!(floats, as_floats);
        }
    }

    #[test]
    fn pieces_of_a_scattered_output_are_the_requests_own_elements(shapes in shapes()) {
        let rank = shapes[0].len() - 1;
        let spec = output(&vec![-1; rank], None);
        let counts: Vec<usize> =
            shapes.iter().map(|shape| usize::try_from(shape.iter().product::<i64>()).unwrap()).collect();
        // The flat output names the request of each element.
        let owners: Vec<usize> =
            counts.iter().enumerate().flat_map(|(owner, &count)| std::iter::repeat_n(owner, count)).collect();
        let pieces = scatter(&spec, true, shapes.iter().map(Vec::as_slice), owners.len()).unwrap();
        prop_assert_eq!(pieces.len(), shapes.len());
        for (owner, (piece, shape)) in pieces.iter().zip(&shapes).enumerate() {
            prop_assert_eq!(&piece.shape[..], &shape[..]);
            prop_assert_eq!(piece.elements.len(), counts[owner]);
            prop_assert!(owners[piece.elements.clone()].iter().all(|&of| of == owner));
        }
    }
}
