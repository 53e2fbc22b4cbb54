// Ask a question by Java's HttpClient, as it is: it offers to upgrade to HTTP/2. The body is sent
// with its length, and in chunks as Spring's clients do; the answer is read whole and streamed.

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.List;
import java.util.stream.Collectors;

public class JavaClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (String stream : List.of("false", "true")) {
            String body = "{\"messages\": [{\"role\": \"user\", \"content\": \"" + arguments[1]
                + "\"}], \"temperature\": 0, \"stream\": " + stream + "}";
            List<BodyPublisher> publishers = List.of(
                BodyPublishers.ofString(body),
                BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body.getBytes())));
            for (BodyPublisher publisher : publishers) {
                HttpRequest request = HttpRequest
                    .newBuilder(URI.create(arguments[0] + "/v1/chat/completions"))
                    .header("Content-Type", "application/json")
                    .POST(publisher)
                    .build();
                var response = client.send(request, BodyHandlers.ofLines());
                System.out.println(response.statusCode() + " "
                    + response.body().filter(line -> !line.isEmpty()).collect(Collectors.joining(" ")));
            }
        }
    }
}
