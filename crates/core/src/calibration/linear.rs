//! Four by four: as much linear algebra as a fit of four coefficients needs.

use crate::cost::PARTS;

pub(super) type Vector = [f64; PARTS];
pub(super) type Matrix = [Vector; PARTS];

/// Sweeps of Jacobi's method; a matrix of four converges in five.
const SWEEPS: usize = 32;

/// Eigenvalues of a symmetric matrix (Jacobi).
pub(super) fn eigenvalues(mut a: Matrix) -> Vector {
    for _ in 0..SWEEPS {
        for p in 0..PARTS {
            for q in p + 1..PARTS {
                if a[p][q] == 0.0 {
                    continue;
                }
                let theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let c = 1.0 / t.hypot(1.0);
                let s = t * c;
                for row in &mut a {
                    (row[p], row[q]) = (c * row[p] - s * row[q], s * row[p] + c * row[q]);
                }
                let (of_p, of_q) = (a[p], a[q]);
                a[p] = std::array::from_fn(|k| c * of_p[k] - s * of_q[k]);
                a[q] = std::array::from_fn(|k| s * of_p[k] + c * of_q[k]);
            }
        }
    }
    std::array::from_fn(|i| a[i][i])
}

/// Inverse of a symmetric matrix over the parts that are `used`, 0 elsewhere; `None` if it has none.
pub(super) fn inverse(m: &Matrix, used: [bool; PARTS]) -> Option<Matrix> {
    let mut a = *m;
    let mut out = [[0.0; PARTS]; PARTS];
    for i in 0..PARTS {
        out[i][i] = 1.0;
        for j in 0..PARTS {
            if !(used[i] && used[j]) {
                a[i][j] = if i == j { 1.0 } else { 0.0 };
            }
        }
    }
    for i in 0..PARTS {
        let pivot = (i..PARTS).max_by(|p, q| a[*p][i].abs().total_cmp(&a[*q][i].abs()))?;
        if a[pivot][i].abs() < 1e-12 {
            return None;
        }
        a.swap(i, pivot);
        out.swap(i, pivot);
        let scale = 1.0 / a[i][i];
        a[i] = a[i].map(|x| x * scale);
        out[i] = out[i].map(|x| x * scale);
        let (of_a, of_out) = (a[i], out[i]);
        for row in (0..PARTS).filter(|row| *row != i) {
            let factor = a[row][i];
            for k in 0..PARTS {
                a[row][k] -= factor * of_a[k];
                out[row][k] -= factor * of_out[k];
            }
        }
    }
    for (i, row) in out.iter_mut().enumerate() {
        row.iter_mut().enumerate().filter(|(j, _)| !(used[i] && used[*j])).for_each(|(_, x)| *x = 0.0);
    }
    Some(out)
}

pub(super) fn times(m: &Matrix, v: &Vector) -> Vector {
    m.map(|row| dot(&row, v))
}

pub(super) fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The `x` without negative parts at which `x·m·x - 2·b·x` is least, of every choice of parts that are 0.
pub(super) fn not_negative(m: &Matrix, b: &Vector) -> Vector {
    let mut best = ([0.0; PARTS], 0.0);
    for choice in 1u32..1 << PARTS {
        let used = std::array::from_fn(|i| choice & (1 << i) != 0);
        let Some(inverse) = inverse(m, used) else { continue };
        let x = times(&inverse, b);
        let value = dot(&x, &times(m, &x)) - 2.0 * dot(b, &x);
        if x.iter().all(|x| *x >= 0.0) && value < best.1 {
            best = (x, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: Matrix =
        [[4.0, 2.0, 0.0, 0.4], [2.0, 5.0, 1.0, 0.0], [0.0, 1.0, 3.0, 0.2], [0.4, 0.0, 0.2, 1.0]];

    #[test]
    fn an_inverse_undoes_its_matrix_on_the_parts_in_use() {
        for used in [[true; PARTS], [true, false, true, true]] {
            let inverse = inverse(&M, used).unwrap();
            for i in (0..PARTS).filter(|i| used[*i]) {
                let mut unit = [0.0; PARTS];
                unit[i] = 1.0;
                let mut back = times(&M, &times(&inverse, &unit));
                (0..PARTS).filter(|k| !used[*k]).for_each(|k| back[k] = 0.0);
                assert!(back.iter().zip(unit).all(|(a, b)| (a - b).abs() < 1e-12), "{back:?}");
            }
        }
        assert_eq!(inverse(&[[1.0; PARTS]; PARTS], [true; PARTS]), None);
    }

    #[test]
    fn eigenvalues_have_the_trace_and_the_determinant() {
        let values = eigenvalues(M);
        assert!((values.iter().sum::<f64>() - 13.0).abs() < 1e-12);
        let mut diagonal = [[0.0; PARTS]; PARTS];
        (0..PARTS).for_each(|i| diagonal[i][i] = (i + 1) as f64);
        assert_eq!(eigenvalues(diagonal), [1.0, 2.0, 3.0, 4.0]);
        // By expansion of minors.
        assert!((values.iter().product::<f64>() - 40.8).abs() < 1e-9, "{}", values.iter().product::<f64>());
    }

    #[test]
    fn what_would_be_negative_is_nothing() {
        let b = times(&M, &[1.0, -0.5, 2.0, 3.0]);
        let x = not_negative(&M, &b);
        assert_eq!(x[1], 0.0);
        assert!(x[0] >= 0.0 && x[2] > 0.0 && x[3] > 0.0);
        let exact = not_negative(&M, &times(&M, &[1.0, 0.5, 2.0, 3.0]));
        assert!(exact.iter().zip([1.0, 0.5, 2.0, 3.0]).all(|(a, b)| (a - b).abs() < 1e-12));
    }
}
